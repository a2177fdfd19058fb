"""What the grader writes: JUnit XML, Gradescope's and an own JSON, a page, a table, a summary.

All of a submission's files follow from its record, which is the content of its result.json.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from minipipe.teach.course import Course
from minipipe.teach.progress import MARKS

VERSION = 1  # of result.json


def read(out: Path) -> dict[str, dict[str, Any]]:
    """Name -> record of what a folder has from earlier; what can't be read is not there."""
    records = {}
    for path in sorted(out.glob("*/result.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["version"] == VERSION:
                records[record["name"]] = record
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return records


def write(out: Path, record: dict[str, Any]) -> None:
    """The files of one submission; result.json last, since a record is read from it again."""
    folder = out / folder_name(record["name"])
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "junit.xml", junit(record))
    _write(folder / "results.json", json.dumps(gradescope(record), indent=1))
    _write(folder / "page.html", page(record))
    _write(folder / "result.json", json.dumps(record, indent=1))


def write_all(out: Path, report: dict[str, Any], records: dict[str, dict], course: Course) -> None:
    _write(out / "grades.csv", grades(records, course))
    _write(out / "summary.md", summary(report, records, course))


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(text.encode("utf-8", "replace"))
    temporary.replace(path)


def folder_name(name: str) -> str:
    """A name as that of a folder: no separators, and not hidden."""
    plain = re.sub(r"[^\w.,'@()+ -]", "_", name).strip(". ")[:50]
    plain = plain.replace("grades.csv", "grades").replace("summary.md", "summary")
    mark = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:6]
    return plain if plain == name else f"{plain}-{mark}"  # no two names are one folder


def brief(record: dict[str, Any]) -> dict[str, Any]:
    """A submission's line of the report."""
    kept = ("name", "folder", "email", "points", "max_points", "notes")
    points = {result["task"]: result["points"] for result in record["tasks"]}
    return {key: record[key] for key in kept} | {"tasks": points}


def first_wrong(result: dict[str, Any]) -> dict[str, Any] | None:
    return next((test for test in result["tests"] if test["status"] != "passed"), None)


def _why(result: dict[str, Any]) -> str:
    """What a student reads about a task that lacks points."""
    wrong = first_wrong(result)
    lines = [result["reason"], wrong["message"] if wrong else ""]
    if result["status"] == "not written":
        lines = ["It is not written yet."]
    return "\n".join(filter(None, lines))


def _parts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts with points; one where it is not known which there are."""
    parts = result["parts"] or [{"name": "all", "share": 100, "passed": result["points"] > 0}]
    return [part | {"max_points": round(result["max_points"] * part["share"] / 100, 4)}
            for part in parts]  # fmt: skip


def junit(record: dict[str, Any]) -> str:
    """JUnit XML: a suite a task with its points as properties, a case a test."""
    root = ElementTree.Element("testsuites", name=record["name"])
    for result in record["tasks"]:
        no_tests = {"name": "answer", "part": "all", "seconds": 0.0, "status": result["status"],
                    "message": ""}  # fmt: skip
        tests = result["tests"] or [no_tests]
        broken = result["status"] in ("error", "timeout")
        failures = sum(test["status"] != "passed" for test in tests)
        suite = ElementTree.SubElement(
            root, "testsuite", name=f"{result['task']} {result['title']}",
            tests=str(len(tests) + broken), failures=str(failures), errors=str(int(broken)),
            time=f"{result['seconds']:.3f}")
        properties = ElementTree.SubElement(suite, "properties")
        for name in ("points", "max_points", "status"):
            ElementTree.SubElement(properties, "property", name=name, value=str(result[name]))
        for test in tests:
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"task_{result['task'].replace('.', '_')}",
                name=test["name"], time=f"{test['seconds']:.3f}")
            if test["status"] != "passed":
                text = test["message"] or result["reason"] or test["status"]
                ElementTree.SubElement(case, "failure", message=text.partition("\n")[0]).text = text
        if broken:
            case = ElementTree.SubElement(suite, "testcase", classname="task", name="process")
            ElementTree.SubElement(case, "error", message=result["reason"]).text = result["output"]
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def gradescope(record: dict[str, Any]) -> dict[str, Any]:
    """Gradescope's results.json: an entry a part of a task."""
    tests = []
    for result in record["tasks"]:
        for number, part in enumerate(_parts(result), 1):
            tests.append({
                "name": f"{result['task']} {result['title']}: {part['name']}",
                "number": f"{result['task']}.{number}", "max_score": part["max_points"],
                "score": part["max_points"] if part["passed"] else 0.0,
                "status": "passed" if part["passed"] else "failed",
                "output": "" if part["passed"] else _why(result), "output_format": "text",
                "tags": [f"lesson {result['task'].partition('.')[0]}"], "visibility": "visible",
            })  # fmt: skip
    return {"score": record["points"], "visibility": "visible", "stdout_visibility": "hidden",
            "execution_time": round(sum(result["seconds"] for result in record["tasks"]), 2),
            "output": "\n".join([f"minipipe {record['minipipe']}, seed {record['seed']}",
                                 *record["notes"]]),
            "extra_data": {"max_score": record["max_points"], "tests": record["tests"]},
            "tests": tests}  # fmt: skip


_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:auto;padding:1rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f4f4f4;padding:.6rem;font-size:.85rem}img{max-width:100%}
section{border-top:1px solid #bbb}.good{color:#060}.bad{color:#a00}ul{list-style:none;padding:0}"""


def page(record: dict[str, Any]) -> str:
    """What a student reads: points, each task's parts, and the first case that is wrong."""
    lines = ["<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
             '<meta name="viewport" content="width=device-width, initial-scale=1">',
             f"<title>{escape(record['name'])}</title><style>{_STYLE}</style></head><body>",
             f"<h1>{escape(record['name'])}</h1>",
             f"<p><strong>{record['points']:g} of {record['max_points']:g} points</strong></p>",
             *(f"<p>{escape(note)}</p>" for note in record["notes"])]  # fmt: skip
    for result in record["tasks"]:
        lines += _section(result)
    return "\n".join([*lines, f"<p>minipipe {escape(record['minipipe'])}, seed {record['seed']}, "
                      f"tests {record['tests'][:12]}</p></body></html>\n"])  # fmt: skip


def _section(result: dict[str, Any]) -> list[str]:
    good = result["status"] == "passed"
    lines = [f'<section><h2 class="{"good" if good else "bad"}">{MARKS[result["status"]]} '
             f"{result['task']} {escape(result['title'])}</h2>",
             f"<p>{result['points']:g} of {result['max_points']:g} points: {result['status']}</p>",
             "<ul>"]  # fmt: skip
    for part in result["parts"]:
        mark, kind = ("✓", "good") if part["passed"] else ("✗", "bad")
        lines.append(f'<li class="{kind}">{mark} {escape(part["name"])} ({part["share"]} %)</li>')
    lines.append("</ul>")
    if not good:
        lines.append(f"<pre>{escape(_why(result))}</pre>")
        picture = (first_wrong(result) or {}).get("picture")
        if picture:
            lines.append('<img alt="your table below a right one" '
                         f'src="data:image/png;base64,{escape(picture)}">')  # fmt: skip
        if result["output"].strip():
            shown = result["output"].strip()[-2000:]
            lines.append(f"<details><summary>What it printed</summary><pre>{escape(shown)}</pre>"
                         "</details>")  # fmt: skip
    return [*lines, "</section>"]


def _lessons(record: dict[str, Any], course: Course) -> dict[int, str]:
    """Lesson -> points; "" where none of its tasks was graded."""
    points = {result["task"]: result["points"] for result in record["tasks"]}
    return {number: f"{sum(points[t.id] for t in lesson.tasks if t.id in points):g}"
            if any(t.id in points for t in lesson.tasks) else ""
            for number, lesson in course.lessons.items() if lesson.tasks}  # fmt: skip


def grades(records: dict[str, dict], course: Course) -> str:
    """The table for a spreadsheet: a line a student, lessons and tasks in columns."""
    lines = io.StringIO()
    table = csv.writer(lines)
    lessons = [number for number, lesson in course.lessons.items() if lesson.tasks]
    table.writerow(["name", "folder", "email", "submitted", "points", "max_points",
                    *(f"lesson {number}" for number in lessons), *course.tasks])  # fmt: skip
    for name in sorted(records):
        record = records[name]
        points = {result["task"]: result["points"] for result in record["tasks"]}
        texts = [_harmless(record[key]) for key in ("name", "folder", "email", "submitted")]
        table.writerow([*texts, record["points"], record["max_points"],
                        *_lessons(record, course).values(),
                        *(points.get(id, "") for id in course.tasks)])  # fmt: skip
    return lines.getvalue()


def _harmless(text: str) -> str:
    """A student's text so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def summary(report: dict[str, Any], records: dict[str, dict], course: Course) -> str:
    """Markdown for a CI's page: students by lessons, and the tasks that most students lack."""
    graded = {result["task"] for record in records.values() for result in record["tasks"]}
    lessons = [number for number, lesson in course.lessons.items()
               if any(task.id in graded for task in lesson.tasks)]  # fmt: skip
    most = max((record["max_points"] for record in records.values()), default=0)
    lines = ["# Grades", "", f"{len(records)} submissions, {most:g} points; minipipe "
             f"{report['minipipe']}, seed {report['seed']}, tests {report['tests'][:12]}.", "",
             _row("student", "points", *(f"lesson {number}" for number in lessons)),
             _row(*["---"] * (2 + len(lessons)))]  # fmt: skip
    for name in sorted(records):
        points = _lessons(records[name], course)
        lines.append(_row(name, f"{records[name]['points']:g}", *(points[n] for n in lessons)))
    lines += ["", "## Most failed tasks", "", _row("task", "title", "without full points"),
              _row("---", "---", "---")]  # fmt: skip
    all_results = [result for record in records.values() for result in record["tasks"]]
    missed = [(id, [r for r in all_results if r["task"] == id]) for id in course.tasks]
    counts = [(sum(r["points"] < r["max_points"] for r in found), len(found), id)
              for id, found in missed]  # fmt: skip
    for bad, of, id in sorted(counts, key=lambda c: -c[0])[:10]:
        if bad:
            lines.append(_row(id, course.tasks[id].title, f"{bad} of {of}"))
    notes = [f"{name}: {note}" for name in sorted(records) for note in records[name]["notes"]]
    for title, items in [("Replaced by a later submission", report["replaced"]),
                         ("Not in the roster", report["unknown"]),
                         ("Nothing handed in", report["without"]), ("Notes", notes)]:  # fmt: skip
        if items:
            lines += ["", f"## {title}", "", *(f"- {_plain(item)}" for item in items)]
    return "\n".join(lines) + "\n"


def _row(*cells: Any) -> str:
    return "| " + " | ".join(_plain(str(cell)) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text that neither ends a cell nor is taken for Markdown or HTML."""
    return re.sub(r"([\\`*_|<>\[\]#])", r"\\\1", " ".join(text.split()))
