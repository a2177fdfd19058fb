"""The judge in a process that has done other things before."""

import json
import subprocess
import sys
import textwrap


def test_ranks_of_a_task_start_also_after_a_launch(tmp_path):
    """The fork server is then one that has not imported what judged children need."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("""
        import json
        from minipipe.ranks.launch import launch
        from minipipe.teach import mutants, sources
        from minipipe.teach.course import find_course

        def rank_of(rank):
            return rank

        if __name__ == "__main__":
            launched = launch(rank_of, ranks=2)
            course = find_course()
            states = [mutants.judge_text(course, course.task(id), sources.task_text(course, id))
                      for id in ("1.1", "1.2", "1.3")]
            print(json.dumps([launched, [result.status for result in states]]))
    """))  # fmt: skip
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 1], ["passed"] * 3]
