"""What runs inside the sandbox: a warm interpreter that forks one child a test.

Isolated, the interpreter is process 1 of its own namespaces: it never runs code under test, children cannot signal it,
and with ``kill(-1)`` it ends whatever a test left. It hears its owner on a control socket: a packet with limits and a
socket starts a child on that socket, ``E`` ends it and cleans up, ``R`` is the answer when that is done.

A child is either the *candidate*, which runs the code under test and answers calls by value, or the *checker*, which
runs the tests (text of the data set, never of a model) against a stand-in that asks the candidate through the owner.
"""

import ast
import builtins
import contextlib
import os
import random
import shutil
import signal
import socket
import struct
import sys
import types
import unittest

if __name__ != "__main__":  # inside the sandbox, the three files are one text
    from comlrl.sandbox.lockdown import drop_capabilities, filter_system_calls, set_limits
    from comlrl.sandbox.values import BadValue, decode, encode

# Loaded once, so that no test waits for them.
PRELOAD = [
    "abc",
    "array",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "textwrap",
    "time",
    "traceback",
    "typing",
    "uuid",
]


def serve(control, isolated, base):
    """The warm interpreter: forks a child for each packet until the owner is gone."""
    for name in PRELOAD:
        __import__(name)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    if isolated:
        assert os.getpid() == 1
        drop_capabilities()
    os.environ.clear()
    sys.path[:] = [entry for entry in sys.path if entry]
    folder = os.path.join("/tmp" if isolated else base, "test")
    control.send(b"R")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            run_child(descriptors[0], folder, isolated, *struct.unpack("=IIII", data))
        os.close(descriptors[0])
        if control.recv(1) != b"E":
            end_children(pid, isolated)
            os._exit(0)
        end_children(pid, isolated)
        clean("/tmp" if isolated else base)
        control.send(b"R")


def end_children(pid, isolated):
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1 if isolated else pid, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def clean(folder):
    """Empties the folder of tests. What cannot be removed goes with this process, whose namespace the folder is in."""
    try:
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.remove(path)
    except (OSError, RecursionError):
        os._exit(1)


def run_child(descriptor, folder, isolated, memory_mb, cpu_seconds, file_mb, max_bytes):
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.mkdir(folder, 0o700)
        os.chdir(folder)
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        set_limits(memory_mb, cpu_seconds, file_mb)
        filter_system_calls()
        channel = Channel(socket.socket(fileno=descriptor), max_bytes)
        job = decode(channel.receive())
        if job["role"] == "candidate":
            Candidate(job, channel).run()
        else:
            channel.send(b"D" + encode(run_checks(job, channel)))
    finally:
        os._exit(0)


class Channel:
    """Frames on a socket: a length of four bytes, then the content."""

    def __init__(self, link, max_bytes):
        self.link, self.max_bytes = link, max_bytes

    def send(self, data):
        if len(data) > self.max_bytes:
            raise BadValue(f"{len(data)} bytes are too many")
        self.link.sendall(struct.pack("=I", len(data)) + data)

    def receive(self):
        (length,) = struct.unpack("=I", self.exactly(4))
        if length > self.max_bytes:
            raise BadValue(f"{length} bytes are too many")
        return self.exactly(length)

    def exactly(self, length):
        parts = bytearray()
        while len(parts) < length:
            part = self.link.recv(min(length - len(parts), 1 << 16))
            if not part:
                raise EOFError("the other side is gone")
            parts += part
        return bytes(parts)


# --- the candidate's side: nothing here is trusted by anybody ---


class Poison:
    """Stands for a helper's value: whoever looks at it fails, whoever ignores it does not notice."""

    def _fail(self, *_):
        raise TypeError("the helper's value is withheld")

    __bool__ = __eq__ = __ne__ = __hash__ = __len__ = __iter__ = __getattr__ = _fail


class Candidate:
    """Runs modules in namespaces of their own, then answers calls."""

    def __init__(self, job, channel):
        self.job, self.channel = job, channel
        self.objects, self.error = [], None

    def run(self):
        try:
            self.objects.append(self.load())
        except Exception as error:
            self.error = describe(error)
        while True:
            try:
                request = self.channel.receive()
            except EOFError:
                return
            self.channel.send(self.answer(request))

    def load(self):
        names: dict = {}
        for number, module in enumerate(self.job["modules"]):
            name = f"solution_{number}"
            sys.modules[name] = space = types.ModuleType(name)
            space.__dict__.update({key: names[key] for key in module["take"] if key in names})
            exec(compile(module["source"], f"<{name}>", "exec"), space.__dict__)
            names = dict(space.__dict__)
            if self.job["withhold"] in names:
                names[self.job["withhold"]] = lambda *_, **__: Poison()
        return names[self.job["entry"]]

    def answer(self, request):
        if self.error is not None:
            return encode(["error", *self.error])
        keep = self.keep if self.job["live"] else None
        try:
            operation, target, *rest = decode(request, self.objects.__getitem__)
            return encode(["ok", getattr(self, "do_" + operation)(self.objects[target], *rest)], keep)
        except BaseException as error:
            return encode(["error", *describe(error)])

    def keep(self, value):
        for number, known in enumerate(self.objects):
            if known is value:
                return number
        self.objects.append(value)
        return len(self.objects) - 1

    def do_call(self, target, args, kwargs):
        return target(*args, **kwargs)

    def do_method(self, target, name, args, kwargs):
        return getattr(target, name)(*args, **kwargs)

    def do_get(self, target, name):
        return getattr(target, name)

    def do_set(self, target, name, value):
        setattr(target, name, value)

    def do_item(self, target, key):
        return target[key]

    def do_len(self, target):
        return len(target)

    def do_list(self, target):
        return list(target)


def describe(error):
    """The nearest built-in exception's name, and the text."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind]
    return kinds[0], f"{type(error).__name__}: {error}"[:300]


# --- the checker's side: only the data set's text runs here ---


class CandidateGone(BaseException):
    """The candidate ended, ran out of time, or wanted to end. No ``except Exception`` of a test hides it."""


class Asker:
    """Sends operations to the candidate, through the owner."""

    def __init__(self, channel):
        self.channel = channel

    def ask(self, *request):
        self.channel.send(b"C" + encode(list(request), number_of))
        data = self.channel.receive()
        if data == b"":
            raise CandidateGone("the candidate ended or ran out of time")
        try:
            reply = decode(data, lambda number: Remote(self, int(number)))
            good = isinstance(reply, list) and len(reply) == (2 if reply[0] == "ok" else 3)
        except (BadValue, IndexError, TypeError):
            good = False
        if not good:
            raise TypeError("the candidate's answer is no value")
        if reply[0] == "ok":
            return reply[1]
        kind = vars(builtins).get(reply[1] if isinstance(reply[1], str) else "")
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise CandidateGone(str(reply[2])[:300])
        raise rebuilt(kind, str(reply[2])[:300])


def rebuilt(kind, text):
    try:
        return kind(text)
    except TypeError:  # UnicodeDecodeError needs five arguments
        return ValueError(text)


def is_remote(value):
    return type(value) is Remote


def number_of(value):
    if not is_remote(value):
        raise TypeError(f"a {type(value).__name__} of the tests cannot be handed to the candidate")
    return value._number


class Remote:
    """An object that lives in the candidate. Comparisons are made here: two are equal if they are the same object."""

    def __init__(self, asker, number, made_by=None):
        self.__dict__.update(_asker=asker, _number=number, _made_by=made_by)

    def __call__(self, *args, **kwargs):
        result = self._asker.ask("call", self._number, list(args), kwargs)
        if is_remote(result):
            result.__dict__["_made_by"] = self._number
        return result

    def __getattr__(self, name):
        return self._asker.ask("get", self._number, name)

    def __setattr__(self, name, value):
        self._asker.ask("set", self._number, name, value)

    def __getitem__(self, key):
        return self._asker.ask("item", self._number, key)

    def __len__(self):
        return int(self._asker.ask("len", self._number))

    def __iter__(self):
        return iter(self._asker.ask("list", self._number))

    def __str__(self):
        text = self._asker.ask("method", self._number, "__str__", [], {})
        return text if isinstance(text, str) else object.__repr__(self)

    def __bool__(self):
        return True

    def __eq__(self, other):
        return is_remote(other) and other._number == self._number

    def __hash__(self):
        return hash(self._number)

    def __instancecheck__(self, other):  # isinstance(other, self): whether calling self made it
        return is_remote(other) and other._made_by == self._number


def run_checks(job, channel):
    """``[[name, passed, message], ...]`` of a ``check(candidate)`` function or of unittest classes."""
    asker = Asker(channel)
    random.seed(0)  # tests that draw arguments draw the same ones each time
    sys.modules["tests"] = module = types.ModuleType("tests")
    space = module.__dict__
    if job["kind"] == "check":
        return run_check_function(job, asker, space)
    space[job["entry"]] = Remote(asker, 0)
    exec(compile(job["source"], "<tests>", "exec"), space)
    return run_unittests(module)


def run_check_function(job, asker, space):
    record = Record()
    tree = ast.parse(job["source"])
    counter = CountAsserts()
    tree = ast.fix_missing_locations(counter.visit(tree))
    record.names = counter.names
    space["__record__"] = record
    exec(compile(job["setup"], "<prompt>", "exec"), space)

    def candidate(*args, **kwargs):
        return asker.ask("call", 0, list(args), kwargs)

    space.setdefault(job["entry"], candidate)
    exec(compile(tree, "<tests>", "exec"), space)
    try:
        space["check"](candidate)
    except BaseException as error:
        record.stopped = f"{type(error).__name__}: {error}"
    return record.results()


class CountAsserts(ast.NodeTransformer):
    """Turns every assert that says anything into ``try: assert ...; passed`` / ``except: failed``, and goes on."""

    def __init__(self):
        self.names = []

    def visit_Assert(self, node):
        if not counts(node):
            return ast.Pass()
        number = len(self.names)
        self.names.append(ast.unparse(node)[:300])
        block = ast.parse(
            f"try:\n    pass\nexcept BaseException as __error__:\n    __record__.failed({number}, __error__)\n"
            f"else:\n    __record__.passed({number})"
        ).body[0]
        assert isinstance(block, ast.Try)
        block.body = [node]
        return block


def counts(node):
    """Whether an assert can fail: ``assert True`` says nothing."""
    return any(isinstance(part, ast.Name) and part.id not in ("True", "False") for part in ast.walk(node.test))


class Record:
    """One outcome an assert of the text: passed if it was reached and held each time."""

    def __init__(self):
        self.names, self.good, self.bad, self.stopped = [], set(), {}, ""

    def passed(self, number):
        self.good.add(number)

    def failed(self, number, error):
        self.bad.setdefault(number, f"{type(error).__name__}: {error}".strip()[:300])

    def results(self):
        return [
            [
                name,
                number in self.good and number not in self.bad,
                self.bad.get(number, "" if number in self.good else f"not reached {self.stopped}"[:300]),
            ]
            for number, name in enumerate(self.names)
        ]


def run_unittests(module):
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    results = []

    def walk(tests):
        for test in tests:
            if isinstance(test, unittest.TestSuite):
                walk(test)
            else:
                results.append(run_unittest(test))

    walk(suite)
    return results


def run_unittest(test):
    outcome = unittest.TestResult()
    name = test.id().removeprefix("tests.")
    try:
        test.run(outcome)
    except BaseException as error:
        return [name, False, f"{type(error).__name__}: {error}"[:300]]
    bad = outcome.errors + outcome.failures
    if bad:
        return [name, False, bad[0][1].strip().rsplit("\n", 1)[-1][:300]]
    return [name, outcome.testsRun == 1 and not outcome.skipped and not outcome.unexpectedSuccesses, ""]
