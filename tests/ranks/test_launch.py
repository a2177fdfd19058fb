"""The launcher: what comes back, what is printed, and that nothing stays behind."""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from minipipe.ranks.launch import RankError, RankTimeout, launch

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
pytestmark = [
    pytest.mark.timeout(40),
    pytest.mark.skipif(os.name != "posix", reason="these tests speak POSIX"),
]


def ranks_of(parent: int) -> list[psutil.Process]:
    """The processes that a parent has started, but for multiprocessing's two helpers."""
    helpers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    started = []
    for process in psutil.Process(parent).children(recursive=True):
        with_helper = any(h in " ".join(process.cmdline()) for h in helpers)
        # Forked ranks have the fork server's command line, but a fork server for their parent.
        if not with_helper or process.ppid() != parent:
            started.append(process)
    return started


@pytest.fixture(autouse=True)
def nothing_stays():
    threads = set(threading.enumerate())
    yield
    assert ranks_of(os.getpid()) == []
    assert set(threading.enumerate()) <= threads


def gone(pids, within=5.0) -> bool:
    end = time.monotonic() + within
    while alive := [p for p in pids if psutil.pid_exists(p) and not is_zombie(p)]:
        if time.monotonic() > end:
            return not alive
        time.sleep(0.05)
    return True


def is_zombie(pid) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_script(text: str, *command, **options) -> subprocess.Popen:
    command = command or (sys.executable,)
    return subprocess.Popen(
        [*command, "-c", textwrap.dedent(text)] if len(command) == 1 else list(command),
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
    )  # fmt: skip


def summed(rank, start):
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(rank + start)])
    dist.all_reduce(value)
    return rank, value.item()


# What comes back.


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_results_come_back_in_rank_order(ranks):
    total = float(sum(range(10, 10 + ranks)))
    assert launch(summed, 10, ranks=ranks) == [(rank, total) for rank in range(ranks)]


def test_lambda_closure_and_partial():
    offset = 5
    assert launch(lambda rank: rank + offset, ranks=2) == [5, 6]
    assert launch(partial(max, 1), ranks=3) == [1, 1, 2]
    assert launch(lambda rank, a, b: (rank, a, b), "a", [1], ranks=1) == [(0, "a", [1])]


def test_what_a_rank_finds_around_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_PARENT", "yes")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def look(rank):
        import torch
        import torch.distributed as dist

        names = ("FROM_PARENT", "RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
        environment = [os.environ.get(name) for name in names]
        return environment, os.getcwd(), torch.get_num_threads(), dist.get_world_size()

    first, second = launch(look, ranks=2, cwd=tmp_path, threads=1)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    assert first == (["yes", "0", "2", "127.0.0.1", loopback], str(tmp_path), 1, 2)
    assert second[0][1] == "1"


def test_two_launches_at_once():
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: launch(summed, i, ranks=2)}))
        for i in (0, 10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [(0, 1.0), (1, 1.0)], 10: [(0, 21.0), (1, 21.0)]}


def test_rank_that_returns_early_does_not_cut_off_messages():
    def early(rank):
        import torch
        import torch.distributed as dist

        if rank == 0:
            sys.kept = dist.isend(torch.ones(1000), 1)  # gloo drops what nobody keeps
            return None
        time.sleep(0.3)
        dist.recv(got := torch.zeros(1000), 0)
        return got.sum().item()

    assert launch(early, ranks=2) == [None, 1000.0]


def test_parent_that_has_used_torch_threads():
    script = """
        import sys
        from minipipe.ranks.launch import launch
        assert "torch" not in sys.modules  # the parent needn't wait for it
        import torch
        a = torch.randn(400, 400)
        for _ in range(20):
            a = torch.tanh(a @ a)
        def fn(rank):
            b = torch.randn(300, 300)
            return float((b @ b).shape[0])
        assert launch(fn, ranks=2) == [300.0, 300.0]
    """
    output, _ = run_script(script).communicate(timeout=35)
    assert output == ""  # no warning of torch's either


def test_data_loader_with_workers_in_a_rank():
    def load(rank):
        from torch.utils.data import DataLoader

        return list(DataLoader(range(4), 2, num_workers=1, collate_fn=lambda rows: sum(rows)))

    assert launch(load, ranks=2) == [[1, 5]] * 2


def test_launch_in_a_forked_process():
    launch(abs, ranks=1)  # a fork server runs
    if (pid := os.fork()) == 0:
        os._exit(launch(lambda rank: rank + 7, ranks=1, output=False)[0])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


# What is printed.


def test_lines_stay_whole(capsys):
    def talk(rank):
        for number in range(2000):
            print(f"{rank} {number} " + "x" * 60, file=(sys.stdout, sys.stderr)[number % 2])
        os.write(1, b"written\n")
        ctypes.CDLL(None).printf(b"by C\n")
        print("last", end="")

    launch(talk, ranks=4)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(4):
        own = [line.removeprefix(f"[rank {rank}] ") for line in lines if line[6] == str(rank)]
        expected = [f"{rank} {number} " + "x" * 60 for number in range(2000)]
        assert own[:2001] == [*expected, "written"]
        assert sorted(own[2001:]) == ["by C", "last"] or own[2001:] == ["lastby C"]
    assert len(lines) == 4 * 2003 or len(lines) == 4 * 2002


def test_output_to_a_function_or_nowhere(capsys):
    got = []
    launch(lambda rank: print("ä", rank), ranks=2, output=lambda *line: got.append(line))
    launch(lambda rank: print("unseen"), ranks=2, output=False)
    assert sorted(got) == [(0, "ä 0"), (1, "ä 1")]
    assert capsys.readouterr().out == ""


def test_much_output_without_a_newline():
    def flood(rank):
        left = 8 << 20
        while left:
            left -= os.write(1, b"x" * left)

    sizes = []
    launch(flood, ranks=1, output=lambda rank, line: sizes.append(len(line)))
    assert sum(sizes) == 8 << 20 and max(sizes) <= 2 << 20


# Failures.


def test_exception_shows_the_source_line():
    def fail(rank):
        time.sleep(0.3 * (rank == 1))
        if rank == 1:
            raise KeyError("left")  # the line to see
        time.sleep(60)

    with pytest.raises(RankError) as caught:
        launch(fail, ranks=3)
    error = caught.value
    assert error.rank == 1 and error.cause == "KeyError: 'left'"
    assert isinstance(error.original, KeyError)
    text = "\n".join(error._render_traceback_())
    assert "rank 1: KeyError" in text and "the line to see" in text and "^^^" in text
    assert "time.sleep(60)" in error.where[0] and "time.sleep(60)" in error.where[2]
    assert len(text.splitlines()) <= 8


@pytest.mark.parametrize("delay", [0.0, 0.2])
def test_first_failure_wins_over_lost_connections(delay):
    def fail(rank):
        if rank == 0:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        if rank == 1:
            time.sleep(delay)
            raise ValueError("the reason")
        time.sleep(60)

    with pytest.raises(RankError) as caught:
        launch(fail, ranks=3)
    assert caught.value.rank == 1 and "the reason" in str(caught.value)


def test_lost_connection_alone_is_reported():
    def fail(rank):
        if rank == 1:
            error = ValueError("a peer is gone")
            error.secondary = True
            raise error
        time.sleep(60)

    with pytest.raises(RankError, match="a peer is gone"):
        launch(fail, ranks=2)


@pytest.mark.parametrize("victim", range(3))
def test_killed_rank_is_named(victim):
    def wait(rank):
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError) as caught:
        launch(wait, ranks=3)
    assert caught.value.rank == victim and "SIGKILL" in caught.value.cause


@pytest.mark.parametrize("way, name", [(lambda: os._exit(3), "exit code 3"),
                                       (lambda: os._exit(0), "exit code 0"),
                                       (os.abort, "SIGABRT"),
                                       (lambda: sys.exit(4), "SystemExit: 4")])  # fmt: skip
def test_other_ends(way, name):
    with pytest.raises(RankError, match=f"rank 1: .*{name}"):
        launch(lambda rank: way() if rank == 1 else time.sleep(60), ranks=2)


def test_crash_in_gloo_shows_the_line(capsys):
    def crash(rank):
        import torch
        import torch.distributed as dist

        if rank == 0:
            dist.send(torch.ones(100), 1)
        else:
            dist.recv(torch.ones(1), 0)  # too small: gloo ends the process
        time.sleep(60)

    with pytest.raises(RankError, match="rank 1: killed by SIGABRT") as caught:
        launch(crash, ranks=2)
    assert "too small" in str(caught.value)
    assert "EnforceNotMet" in capsys.readouterr().out


def test_deadlock_names_where_each_rank_stands():
    def deadlock(rank):
        import torch
        import torch.distributed as dist

        if rank == 2:
            return
        dist.recv(torch.zeros(1), 1 - rank)  # nobody sends

    with pytest.raises(RankTimeout) as caught:
        launch(deadlock, ranks=3, timeout=2)
    where = caught.value.where
    assert all("nobody sends" in where[r] and "test_launch.py, line" in where[r] for r in (0, 1))
    assert where[2] == "had returned" and "nobody sends" in str(caught.value)


def test_stopped_rank_is_named_and_killed():
    def stop(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RankTimeout) as caught:
        launch(stop, ranks=2, timeout=2)
    assert "no answer" in caught.value.where[1]


def test_result_that_cannot_be_sent():
    with pytest.raises(RankError, match="rank 1: TypeError: the result, a lock, can't be sent"):
        launch(lambda rank: threading.Lock() if rank else None, ranks=2)


def test_exception_that_cannot_be_sent():
    def fail(rank):
        error = ValueError("with a lock")
        error.lock = threading.Lock()
        raise error

    with pytest.raises(RankError, match="with a lock") as caught:
        launch(fail, ranks=1)
    assert caught.value.original is None


def test_subprocess_of_a_failed_rank_is_gone(tmp_path):
    def start(rank, way):
        process = subprocess.Popen(["sleep", "1000"])
        (tmp_path / f"{way}{rank}").write_text(str(process.pid))
        if rank == 1 and way == "raise":
            raise ValueError
        if rank == 1 and way == "die":
            os._exit(1)

    for way in ("raise", "die", "return"):
        try:
            launch(start, way, ranks=2)
        except RankError:
            assert way != "return"
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) >= 4 and gone(pids)


def test_launch_inside_a_rank_is_refused():
    with pytest.raises(RankError, match="called inside rank 0"):
        launch(lambda rank: launch(print, ranks=1), ranks=1)


def test_error_of_the_output_function_ends_the_ranks():
    def refuse(rank, line):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(lambda rank: (print("x"), time.sleep(60)), ranks=2, output=refuse)


@pytest.mark.parametrize("error, match, change", [
    (ValueError, "ranks must be an int of at least 1, not 0", {"ranks": 0}),
    (TypeError, "ranks must be an int", {"ranks": 2.0}),
    (TypeError, "ranks must be an int", {"ranks": True}),
    (TypeError, "fn must be a function", {"fn": 3}),
    (ValueError, "timeout must be above 0 seconds", {"timeout": 0}),
    (TypeError, "timeout must be", {"timeout": "5"}),
    (ValueError, "threads must be", {"threads": 0}),
    (TypeError, "output must be", {"output": "file"}),
    (TypeError, "backend must be", {"backend": None}),
    (ValueError, "cwd must be a directory", {"cwd": "/no/such"}),
    (TypeError, "can't be sent to the ranks", {"fn": threading.Lock().__enter__}),
])  # fmt: skip
def test_bad_arguments(error, match, change):
    arguments = {"fn": print, "ranks": 1} | change
    with pytest.raises(error, match=match):
        launch(arguments.pop("fn"), **arguments)


# The parent's end.

WAITING = """
    import os, torch, torch.distributed as dist
    from minipipe.ranks.launch import launch
    def fn(rank):
        print(os.getpid())
        dist.recv(torch.zeros(1), 1 - rank)
    launch(fn, ranks=2, timeout=60)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_end_of_the_parent_ends_the_ranks(name):
    parent = run_script(WAITING)
    pids = [int(parent.stdout.readline().split()[-1]) for _ in range(2)]
    everything = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)]
    assert set(pids) <= set(everything)
    parent.send_signal(signal.Signals[name])
    assert parent.wait(10) != 0
    assert gone(everything)
    output = parent.stdout.read()
    assert ("KeyboardInterrupt" in output) == (name == "SIGINT")


@pytest.mark.parametrize("how", ["interrupt", "return"])
def test_end_of_the_parent_ends_a_fork_server_that_still_imports(tmp_path, how):
    """It would notice only once it has torch; here what it imports takes for ever."""
    (tmp_path / "endless.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(99)")
    parent = run_script(f"""
        import multiprocessing.forkserver, os, sys
        from minipipe.ranks.launch import launch
        os.environ["PYTHONPATH"] += os.pathsep + {str(tmp_path)!r}
        multiprocessing.set_forkserver_preload(["endless"])
        if {how == "return"}:
            multiprocessing.forkserver.ensure_running()
            sys.stdin.readline()
        else:
            launch(print, ranks=2)
    """, stdin=subprocess.PIPE)
    everything = []
    try:
        assert parent.stdout.readline() == "here\n"
        everything = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)]
        assert everything
        if how == "return":
            parent.stdin.write("\n")
            parent.stdin.flush()
        else:
            parent.send_signal(signal.SIGINT)
        assert (parent.wait(10) != 0) == (how == "interrupt")
        assert gone(everything)
    finally:
        parent.kill()
        for pid in everything:
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()


# Notebook, torchrun, spawned ranks.


def notebook(*cells):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook()
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    book.cells = [nbformat.v4.new_code_cell(cell) for cell in (path, *map(textwrap.dedent, cells))]
    nbclient.NotebookClient(book, timeout=30, allow_errors=True).execute()
    return [cell.outputs for cell in book.cells[1:]]


def test_function_of_a_notebook_cell():
    good, bad = notebook(
        """
        from minipipe.ranks.launch import launch
        def good(rank):
            print("hello from", rank)
            return rank
        launch(good, ranks=2)
        """,
        """
        def bad(rank):
            if rank == 1:
                raise ValueError("the student's line")
        launch(bad, ranks=2)
        """,
    )
    printed = "".join(output.text for output in good if output.output_type == "stream")
    assert sorted(printed.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
    assert good[-1].data["text/plain"] == "[0, 1]"
    (error,) = (output for output in bad if output.output_type == "error")
    text = "\n".join(error.traceback)
    assert """raise ValueError("the student's line")""" in text and "Cell In[3], line 3" in text
    assert len(error.traceback) <= 8


def test_under_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent("""
        import torch, torch.distributed as dist
        from minipipe.ranks.launch import launch
        def fn(rank, base):
            dist.all_reduce(x := torch.ones(1))
            return base + rank, x.item()
        for _ in range(6):
            results = launch(fn, 5, ranks=2)
            assert results == [(5, 2.0), (6, 2.0)], results
        try:
            launch(fn, 5, ranks=3)
        except ValueError as error:
            print(error)
    """))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    job = run_script("", *command, str(script))
    output, _ = job.communicate(timeout=35)
    assert job.returncode == 0, output
    assert output.count("ranks must be 2") == 2


def test_spawned_ranks_serve_again(tmp_path):
    script = tmp_path / "script.py"  # without a guard: a rank must not run it again
    script.write_text(textwrap.dedent("""
        import os, time
        from minipipe.ranks.launch import RankError, launch
        def fn(rank):
            print("here", rank)
            return os.getpid()
        first = launch(fn, ranks=2)
        assert launch(fn, ranks=2) in (first, first[::-1])
        def fail(rank):
            time.sleep(60 if rank else 0.3)
            return 1 / 0
        try:
            launch(fail, ranks=2)
        except RankError as error:
            assert error.rank == 0 and "time.sleep(60" in error.where[1], error
        print("done")
    """))
    os.environ["MINIPIPE_START"] = ENVIRONMENT["MINIPIPE_START"] = "spawn"
    try:
        output, _ = run_script("", sys.executable, str(script)).communicate(timeout=35)
    finally:
        del os.environ["MINIPIPE_START"], ENVIRONMENT["MINIPIPE_START"]
    assert output.count("[rank 1] here 1\n") == 2 and output.endswith("done\n"), output
