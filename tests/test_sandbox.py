"""The sandbox: values by pipe, isolation, limits, and code that wants to cheat, break out or do damage."""

# ruff: noqa: E501  (programs in strings)

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from comlrl.sandbox import Limits, Module, NoIsolation, Sandbox, isolation
from comlrl.sandbox.values import BadValue, Opaque, decode, encode

METHODS = [method for method in isolation.METHODS if not isolation.works(method)]
pytestmark = pytest.mark.skipif(not METHODS, reason="neither bubblewrap nor unshare works here")
ROOT = Path(__file__).parent.parent
QUICK = Limits(wall_seconds=1.0, memory_mb=256, cpu_seconds=2)


@pytest.fixture(scope="module", params=isolation.METHODS)
def sandbox(request):
    if request.param not in METHODS:
        pytest.skip(isolation.works(request.param))
    with Sandbox(workers=1, isolation_method=request.param, limits=QUICK) as made:
        yield made


def run(sandbox, source, tests="    assert candidate(1) == 2", **more):
    return sandbox.check([Module(source)], "f", f"def check(candidate):\n{tests}\n", **more)


GOOD = "def f(x):\n    return x + 1\n"


# --- values ---


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -7, 2**70, 0.1, -0.0, float("inf"), 1 + 2j, "", "é\ud800\x00", b"\x00\xff", bytearray(b"a"),
        [], [1, [2.0, (3,)]], (1, "a"), {1, 2}, frozenset({"a"}), {1: "a", (1, 2): [None], "i": 2}, ["i", "ff"], ("l", []),
    ],
)  # fmt: skip
def test_values_keep_their_types(value):
    back = decode(encode(value))
    assert repr(back) == repr(value)
    assert type(back) is type(value)


def test_subclasses_travel_as_plain_values_and_objects_as_nothing():
    class Always(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert decode(encode(Always(3))) != 4
    assert type(decode(encode(Always(3)))) is int
    thing = decode(encode(object()))
    assert isinstance(thing, Opaque)
    for look in (lambda: thing == 1, lambda: thing != 1, lambda: bool(thing), lambda: thing < 1):
        with pytest.raises(TypeError, match="no plain value"):
            look()


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'["i", "zz"]', b'["x", 1]', b"1.5", b'["d", [[["l", []], null]]]', b"[" * 100_000, b'["r", 1]'],
)
def test_bytes_that_are_no_value(data):
    with pytest.raises(BadValue):
        decode(data)


def test_values_too_deep_or_too_large():
    deep: list = []
    for _ in range(100):
        deep = [deep]
    loop: list = []
    loop.append(loop)
    for value in (deep, loop, [0] * 300_000):
        with pytest.raises(BadValue):
            encode(value)


# --- what runs ---


def test_each_assert_is_counted_and_the_ones_that_say_nothing_are_not(sandbox):
    tests = "    assert candidate(1) == 2\n    assert True, 'fine'\n    assert candidate(2) == 4\n    assert (\n  candidate(3)"
    tests += " == 4\n    )\n    for i in range(3):\n        assert candidate(i) == i + 1"
    report = run(sandbox, GOOD, tests)
    assert [outcome.passed for outcome in report.outcomes] == [True, False, True, True]
    assert report.status == "done"


def test_an_assert_in_a_loop_must_hold_each_time_and_one_not_reached_fails(sandbox):
    tests = "    for i in range(3):\n        assert candidate(i) == 2\n    if candidate(0) == 0:\n        assert candidate(1) == 2"
    assert [outcome.passed for outcome in run(sandbox, GOOD, tests).outcomes] == [False, False]


def test_errors_reach_the_tests_by_their_builtin_name(sandbox):
    source = "class Mine(ValueError):\n    pass\ndef f(x):\n    raise Mine('bad')\n"
    tests = "    try:\n        candidate(1)\n    except ValueError as error:\n        assert 'bad' in str(error)"
    assert run(sandbox, source, tests).passed == 1


def test_modules_have_their_own_names_and_a_withheld_helper_is_noticed_only_if_it_is_looked_at(sandbox):
    helper = Module("import math\nstep = 1\ndef aux(x):\n    return math.floor(x) + step\n")
    uses = Module("step = 50\ndef f(x):\n    return aux(x) + 0\n", ("aux",))
    ignores = Module("def f(x):\n    aux(x)\n    return x + 1\n", ("aux",))
    tests = "def check(candidate):\n    assert candidate(1) == 2\n"
    for module, withheld in ((uses, 0), (ignores, 1)):
        assert sandbox.check([helper, module], "f", tests).passed == 1
        assert sandbox.check([helper, module], "f", tests, withhold="aux").passed == withheld


def test_runs_do_not_see_each_other(sandbox):
    write = "import math, builtins\nopen('/tmp/left', 'w').write('x')\nmath.pi = 3\nbuiltins.left = 1\n" + GOOD
    assert run(sandbox, write).passed == 1
    look = "import os, math, builtins\ndef f(x):\n    return [os.listdir('/tmp'), math.pi > 3, hasattr(builtins, 'left')]\n"
    assert run(sandbox, look, "    assert candidate(0) == [['test'], True, False]").passed == 1


def test_the_temporary_folder_can_be_used(sandbox):
    source = "def f(x):\n    open('a.txt', 'w').write('2')\n    return int(open('a.txt').read())\n"
    assert run(sandbox, source).passed == 1


# --- code that cheats, breaks out or does damage: none earns credit, none costs more than its time ---

HOSTILE = {
    "exit": "import sys\nsys.exit(0)\n",
    "exit in the call": "import sys\ndef f(x):\n    sys.exit(0)\n",
    "_exit": "import os\ndef f(x):\n    os._exit(0)\n",
    "exit of a default argument": "import os\ndef f(x, y=os._exit(0)):\n    return 2\n",
    "loop without end": "def f(x):\n    while True:\n        pass\n",
    "bare except": "def f(x):\n    while True:\n        try:\n            while True:\n                pass\n        except:\n"
    "            pass\n",
    "an import that hangs": "import time\nwhile True:\n    time.sleep(1)\n",
    "signals ignored": "import signal\nfor s in range(1, 65):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass\n",
    "fork bomb": "import os\ndef f(x):\n    while True:\n        os.fork()\n",
    "fork bomb that goes on": "import os\ndef f(x):\n    while True:\n        try:\n            os.fork()\n        except OSError:\n"
    "            pass\n",
    "memory bomb": "def f(x):\n    a = []\n    while True:\n        a.append(bytearray(10_000_000))\n",
    "output flood": "import os\ndef f(x):\n    while True:\n        print('x' * 100_000)\n        os.write(2, b'x' * 100_000)\n",
    "flood of the pipe": "import os\ndef f(x):\n    while True:\n        for n in range(3, 20):\n            try:\n"
    "                os.write(n, b'\\x10\\0\\0\\0' + b'y' * 16)\n            except OSError:\n                pass\n",
    "huge frame": "import os\nfor n in range(3, 20):\n    try:\n        os.write(n, b'\\xff\\xff\\xff\\xff')\n    except OSError:\n"
    "        pass\ndef f(x):\n    return 1\n",
    "huge answer": "def f(x):\n    return 'x' * 50_000_000\n",
    "endless answer": "def f(x):\n    a = []\n    a.append(a)\n    return a\n",
    "huge number": "def f(x):\n    return 1 << (1 << 26)\n",
    "disk": "def f(x):\n    n = 0\n    while True:\n        n += 1\n        try:\n            open(f'/tmp/{n}', 'wb').write(b'x' * 4_000_000)\n"
    "        except OSError:\n            pass\n",
    "deep folders": "import os\ndef f(x):\n    while True:\n        os.mkdir('d')\n        os.chdir('d')\n",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x)\n",
    "deep source": "def f(x):\n    return " + "(" * 5000 + "2" + ")" * 5000 + "\n",
    "always equal": "class A:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return A()\n",
    "always equal int": "class A(int):\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return A(7)\n",
    "patched builtins": "import builtins, unittest\nbuiltins.AssertionError = ValueError\nbuiltins.isinstance = lambda *a: True\n"
    "builtins.int = str\ndef f(x):\n    return 5\n",
    "forged result": "import os\nfor n in range(0, 20):\n    try:\n        os.write(n, b'\\x1a\\0\\0\\0D[\"l\", [[\"l\", [\"a\", true]]]]')\n"
    "    except OSError:\n        pass\nos._exit(0)\n",
    "looks for the tests": "import gc, sys\ndef f(x):\n    for thing in gc.get_objects():\n        if type(thing) is dict and"
    " 'check' in thing and 'candidate' in str(thing['check']):\n            return 2\n    for frame in sys._current_frames().values():\n"
    "        while frame:\n            if 'check' in frame.f_globals:\n                return 2\n            frame = frame.f_back\n",
    "program": "import subprocess\ndef f(x):\n    return 1 + int(subprocess.run(['/bin/echo', '1'], capture_output=True).stdout)\n",
    "exec": "import os\ndef f(x):\n    os.execv('/bin/true', ['true'])\n",
    "network": "import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', 22), 0.2)\n    return 2\n",
    "thread": "import threading, time\ndef f(x):\n    threading.Thread(target=time.sleep, args=(1000,)).start()\n    return 2\n",
    "kills all": "import os\ndef f(x):\n    os.kill(-1, 9)\n    return 2\n",
    "kills its parent": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    os.kill(1, 9)\n    return 2\n",
    "stops its parent": "import os, signal\ndef f(x):\n    os.kill(1, signal.SIGSTOP)\n    return 2\n",
    "limits of its parent": "import resource\ndef f(x):\n    resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))\n    return 2\n",
    "traces its parent": "import ctypes\ndef f(x):\n    return 2 + ctypes.CDLL(None).ptrace(16, 1, 0, 0)\n",
    "new namespace": "import ctypes\ndef f(x):\n    return 2 + ctypes.CDLL(None).unshare(0x10000000)\n",
    "shared memory": "import ctypes\ndef f(x):\n    return 2 if ctypes.CDLL(None).shmget(1, 4096, 0o1600) >= 0 else 0\n",
    "writes outside": "def f(x):\n    for path in ('/usr/x', '/x', '/dev/x', '/etc/x', '/root/x', '/home/x', '/var/x'):\n        try:\n"
    "            open(path, 'w')\n            return 2\n        except OSError:\n            pass\n",
    "reads secrets": "import os\ndef f(x):\n    if any(os.path.exists(p) for p in ('/etc/passwd', '/proc/1',"
    " '/proc/self', '/sys', '/run', '/var', HERE)):\n        return 2\n",
    "environment": "import os, ctypes\ndef f(x):\n    if 'COMLRL_SECRET' in os.environ or ctypes.CDLL(None).getenv(b'COMLRL_SECRET'):\n"
    "        return 2\n",
    "no entry point": "def g(x):\n    return 2\n",
    "no Python": "def f(x) return 2",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_earns_nothing_costs_its_time_and_leaves_nothing(sandbox, name, monkeypatch):
    monkeypatch.setenv("COMLRL_SECRET", "1")
    before = time.monotonic()
    report = run(sandbox, f"HERE = {__file__!r}\n{HOSTILE[name]}")
    seconds = time.monotonic() - before
    assert report.passed == 0, report
    assert report.total == 1
    assert seconds < QUICK.wall_seconds + 2.0  # half of it is the start of a new interpreter on a loaded machine
    again = run(sandbox, GOOD)  # the next run is not affected
    assert (again.passed, again.status) == (1, "done")
    for interpreter in (sandbox._slots[0].candidate, sandbox._slots[0].checker):
        inside = psutil.Process(interpreter.process.pid).children(recursive=True)
        assert len(inside) <= 1  # the warm interpreter itself


def test_the_tests_may_fail_too_and_take_no_longer_than_theirs(sandbox):
    before = time.monotonic()
    report = run(sandbox, GOOD, "    while True:\n        pass")
    assert (report.status, report.passed) == ("tests", 0)
    assert time.monotonic() - before < QUICK.wall_seconds + 5
    assert run(sandbox, GOOD, "    assert nothing == 1").outcomes[0].message.startswith("NameError")


def test_a_test_that_catches_everything_does_not_hide_the_end_of_the_candidate(sandbox):
    tests = "    try:\n        candidate(1)\n    except Exception:\n        pass\n    assert candidate(1) is None"
    assert run(sandbox, "import os\ndef f(x):\n    os._exit(1)\n", tests).passed == 0


# --- live objects ---

COUNTER = """
class Counter:
    made = 0
    def __init__(self, start=0):
        self.count = start
    def add(self, n):
        if n < 0:
            raise ValueError('negative')
        self.count += n
        return self.count
    @staticmethod
    def double(n):
        return 2 * n
    def copy(self):
        return Counter(self.count)
"""
COUNTER_TESTS = """
import unittest
class CounterTest(unittest.TestCase):
    def setUp(self):
        self.c = Counter(3)
    def test_add(self):
        self.assertEqual(self.c.add(2), 5)
        self.assertEqual(self.c.count, 5)
    def test_set(self):
        self.c.count = 10
        self.assertEqual(self.c.add(1), 11)
    def test_error(self):
        with self.assertRaises(ValueError):
            self.c.add(-1)
    def test_static(self):
        self.assertEqual(Counter.double(4), 8)
    def test_copy(self):
        self.assertIsInstance(self.c, Counter)
        self.assertEqual(self.c.copy().count, 3)
        self.assertNotEqual(self.c.copy(), self.c)
    def test_wrong(self):
        self.assertEqual(self.c.add(2), 6)
    @unittest.skip('no')
    def test_skipped(self):
        pass
"""


def test_unittests_of_a_class(sandbox):
    report = sandbox.unittest([Module(COUNTER)], "Counter", COUNTER_TESTS)
    failed = sorted(outcome.name for outcome in report.outcomes if not outcome.passed)
    assert failed == ["CounterTest.test_skipped", "CounterTest.test_wrong"]
    assert report.total == 7


@pytest.mark.parametrize(
    "source",
    [
        "class Counter:\n    def __init__(self, *a):\n        pass\n    def __eq__(self, o):\n        return True\n"
        "    def __getattr__(self, name):\n        return self\n    def __call__(self, *a):\n        return self\n",
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nclass Counter:\n    pass\n",
        "import os\nclass Counter:\n    def __init__(self, *a):\n        os._exit(0)\n",
        "import unittest\nclass Counter:\n    def __init__(self, *a):\n        raise unittest.SkipTest('x')\n",
        "class Counter:\n    def __init__(self, *a):\n        raise KeyboardInterrupt\n",
    ],
)
def test_hostile_classes_earn_nothing(sandbox, source):
    tests = COUNTER_TESTS.replace("self.assertNotEqual(self.c.copy(), self.c)", "pass")
    report = sandbox.unittest([Module(source)], "Counter", tests)
    assert (report.passed, report.total) == (0, 7)


# --- the pool ---


def test_many_at_once_and_the_end_of_the_pool():
    with Sandbox(workers=2, isolation_method=METHODS[0]) as sandbox:
        reports = {}

        def one(number):
            reports[number] = run(
                sandbox, f"def f(x):\n    return x + {number}\n", f"    assert candidate(1) == 1 + {number}"
            )

        threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [reports[number].passed for number in range(8)] == [1] * 8
        pids = [i.process.pid for slot in sandbox._slots for i in (slot.candidate, slot.checker) if i.process]
        assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert list(Path("/tmp").glob("comlrl-unisolated-*")) == []


def test_an_interpreter_that_was_killed_is_replaced():
    with Sandbox(workers=1, isolation_method=METHODS[0]) as sandbox:
        assert run(sandbox, GOOD).passed == 1
        os.killpg(sandbox._slots[0].candidate.process.pid, signal.SIGKILL)
        time.sleep(0.1)
        assert run(sandbox, GOOD).passed == 1


def test_interpreters_end_with_a_trainer_that_is_killed():
    program = (
        "import time\nfrom comlrl.sandbox import *\ns = Sandbox(workers=1)\n"
        "s.check([Module('def f(x):\\n    return 1\\n')], 'f', 'def check(c):\\n    assert c(1) == 1\\n')\n"
        "print(s._slots[0].candidate.process.pid, s._slots[0].checker.process.pid, flush=True)\ntime.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pids = [int(word) for word in trainer.stdout.readline().split()]
    assert len(pids) == 2
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# --- no isolation ---


def test_without_isolation_it_refuses_unless_allowed(monkeypatch):
    monkeypatch.setattr(isolation, "METHODS", ("missing-tool",))
    with pytest.raises(NoIsolation, match=r"missing-tool: not installed.*allow_unisolated"):
        Sandbox()
    with pytest.raises(NoIsolation, match="isolation=none"):
        Sandbox(isolation_method="none")
    with pytest.raises(ValueError, match="must be auto"):
        Sandbox(isolation_method="docker")
    with Sandbox(workers=1, allow_unisolated=True, limits=QUICK) as sandbox:
        assert sandbox.method == "none"
        assert run(sandbox, GOOD).passed == 1
        assert run(sandbox, HOSTILE["fork bomb"]).passed == 0
        assert run(sandbox, HOSTILE["loop without end"]).passed == 0
        assert run(sandbox, GOOD).passed == 1
    assert list(Path("/tmp").glob("comlrl-unisolated-*")) == []
