"""The Vietnamese pages say what the English ones do: every cell, the same numbers and links."""

import re
import unicodedata
from collections import Counter

import nbformat
import pytest

from minipipe.teach import notebooks, sources
from minipipe.teach.course import find_course, read_toml

COURSE = find_course(__file__)
FOLDER = COURSE.sources / "vi"
GLOSSARY = COURSE.root / "lessons" / "vi" / "glossary.md"
LESSONS = sorted(FOLDER.glob("[0-9]*.md"))
TERMS = ("khoảng trống pipeline", "lan truyền xuôi", "lan truyền ngược", "micro-batch", "stage")
OWN = {"glossary.md", "lessons/vi/glossary.md"}  # links that the English pages have no need of
SWAPPED = {"README.vi.md": "README.md"}  # each README links to the other


def pairs(path):
    """(cell, English, Vietnamese) of a lesson's or the README's prose."""
    vietnamese = notebooks.prose(path)
    if path.stem == "README":
        page = (COURSE.root / "README.md").read_text(encoding="utf-8")
        english = {name: text for name, text in notebooks.pieces(page) if name}
    else:
        cells = sources.read_cells(COURSE.sources / f"{path.stem}.py")
        english = {cell.name: cell.text for cell in cells if cell.kind == "markdown"}
        english["title"] = COURSE.lessons[int(path.stem[:2])].title
    assert english.keys() == vietnamese.keys()
    return [(name, text.strip("\n"), vietnamese[name]) for name, text in english.items()]


def numbers(text):
    """The numbers in digits, those in code and in links' targets too, with decimal points."""
    return Counter(re.findall(r"\d+(?:[.,]\d+)*", text))


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


def fences(text):
    return re.findall(r"^```.*?^```", text, re.M | re.S)


def spans(text):
    """What stands in `code` within the prose."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)}


PAGES = [*LESSONS, FOLDER / "README.md"]


def test_there_are_pages():
    assert [path.stem for path in LESSONS][:3] == [
        "01_one_model_two_ranks", "02_microbatches_and_the_bubble", "03_gpipe"]  # fmt: skip
    assert notebooks.languages(COURSE) == ["vi"]
    words = read_toml(FOLDER / "words.toml")
    assert words.keys() == notebooks.WORDS.keys()
    for name, word in notebooks.WORDS.items():
        assert ("{n}" in word) == ("{n}" in words[name])
        assert words[name] != word


@pytest.mark.parametrize("path", [*PAGES, FOLDER / "words.toml", GLOSSARY], ids=lambda p: p.name)
def test_letters_are_composed(path):
    text = path.read_text(encoding="utf-8")
    assert unicodedata.is_normalized("NFC", text)
    assert not re.search("[\u0300-\u036f\ufffd\u200b\u00a0]", text)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_numbers_are_those_of_the_english_text(path):
    for name, english, vietnamese in pairs(path):
        assert numbers(vietnamese) == numbers(english), name


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_and_figures_are_kept(path):
    for name, english, vietnamese in pairs(path):
        wanted = [SWAPPED.get(link, link) for link in links(english)]
        assert sorted(set(links(vietnamese)) - OWN) == sorted(set(wanted)), name
        assert vietnamese.count("![") == english.count("!["), name


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_form_is_kept(path):
    """As many blocks of code, headings, formulas, table rows; the same names in code."""
    for name, english, vietnamese in pairs(path):
        assert len(fences(vietnamese)) == len(fences(english)), name
        for mark in (r"^#+ ", r"^- ", r"^\|", r"^\$\$|\$\$$"):
            found = [len(re.findall(mark, text, re.M)) for text in (vietnamese, english)]
            assert found[0] == found[1], (name, mark)
        assert spans(english) <= spans(vietnamese), name


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_no_prose_is_left_in_english(path):
    for name, english, vietnamese in pairs(path):
        english_words = re.findall(r"\b(?:the|and|of|with|which|that|is|are)\b",
                                   re.sub(r"`[^`]*`|\*[^*]*\*", "", vietnamese))  # fmt: skip
        assert len(english_words) < 2, (name, english_words)
        if len(english.split()) > 4 and not english.startswith("**conda**"):
            assert vietnamese != english, name
            assert not vietnamese.isascii(), name


@pytest.mark.parametrize("path", PAGES[1:], ids=lambda p: p.name)
def test_one_term_for_a_thing(path):
    text = " ".join(path.read_text(encoding="utf-8").lower().split())
    for term in TERMS:
        assert term in text, term
    for other in ("bong bóng", "vi lô", "truyền thẳng", "tích luỹ", "tỷ lệ", "lịch trình"):
        assert other not in text, other


def test_the_first_lesson_has_no_bubble_yet():
    text = " ".join(LESSONS[0].read_text(encoding="utf-8").lower().split())
    for term in TERMS[1:3] + TERMS[4:]:
        assert term in text


def test_glossary():
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in GLOSSARY.read_text(encoding="utf-8").splitlines()
            if line.startswith("| ") and not line.startswith("| tiếng Việt")]  # fmt: skip
    assert len(rows) >= 45
    assert all(len(row) == 3 and all(row) and row[2].endswith((".", "…")) for row in rows)
    listed = [row[0] for row in rows]
    assert len(set(listed)) == len(listed)
    for term in TERMS:
        assert any(name.startswith(term) for name in listed), term


def test_the_built_pages_link_to_what_is_there():
    """Also the figures of the README; test_notebooks.py looks for the lessons' figures."""
    for path, text in notebooks.built(COURSE):
        if path.parent.name == "vi":
            cells = nbformat.reads(text, as_version=4).cells
            text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        elif path.name != "README.vi.md":
            continue
        for link in links(text):
            if "://" not in link and not link.startswith("../figures/"):
                assert (path.parent / link.partition("#")[0]).exists(), (path.name, link)
