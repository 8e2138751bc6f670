"""The reward contract: what a reward function gets, what it may return, and what happens when it fails.

A reward function scores the joint answers of one node of the rollout tree. It gets one list an agent, all of
one length: entry j of all lists together is joint answer j. It returns one reward for each. The forms, for
two agents:

    f(c1, c2)                 one list an agent
    f(prompts, c1, c2)        the prompts first
    f(completions)            one list of lists, completions = [c1, c2]
    f(*args)                  like f(c1, c2)

A parameter named `prompts` or `batch_items` is bound by that name wherever it stands, and `**kwargs` gets
both. Other parameters with a default keep it; only a default of None may stand for an agent's list (`f(c1,
c2=None)`), where the count fits. A function of one agent is `f(completions)` or `f(prompts, completions)`.
All may be `async def`.
"""

import asyncio
import functools
import inspect
import math
import os
import sys
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch

from comlrl.worker_process import TimedOut, UnpicklableArguments, WorkerClosed, WorkerProcess, add_note

Score = tuple[float | None, dict[str, float]]  # one function's reward of one joint sample, and its named parts
Source = int | str  # where an argument comes from: an agent's number, "completions" (list of lists), or one of:
NAMED = ("prompts", "batch_items")
_CANCEL_SECONDS = 1.0  # what a cancelled coroutine gets to clean up


@dataclass(frozen=True)
class RewardCall:
    """The joint answers of one node, all of one row."""

    row: dict
    prompts: list[str]  # one text an agent: what each agent was given
    completions: list[list[str]]  # [agent][joint sample], all of one length J
    name: str  # for example "row 3, turn 1, node 0/2": used in errors and logs
    sample_ids: list[str]  # J ids, used in errors and logs


@dataclass(frozen=True)
class JointReward:
    """The reward of one joint answer. A `value` of None leaves the statistics; `parts` are only logged."""

    value: float | None
    parts: dict[str, float]


class RewardSource(Protocol):
    """What rewards a turn: the task's functions (`Rewards`), or a learned model."""

    counters: dict[str, int]
    incidents: list[str]
    collective: bool  # every process calls it with all calls, and it divides the work itself

    def __call__(self, calls: Sequence[RewardCall]) -> list[list[JointReward]]: ...


class RewardContractError(ValueError):
    """A function returned something other than one reward a joint sample: never skipped, as it is a bug."""


# ----------------------------------------------------------------------------------- the arguments of a call


@dataclass(frozen=True)
class Binding:
    """The source of each argument of a reward function."""

    positional: tuple[Source, ...]
    keyword: dict[str, Source]

    def arguments(self, call: RewardCall, start: int, stop: int) -> tuple[list, dict[str, Any]]:
        """The arguments for the joint samples start to stop - 1: new lists of length stop - start."""
        completions = [answers[start:stop] for answers in call.completions]
        values: dict[Source, list] = {
            "completions": completions,
            "prompts": call.prompts[:1] * (stop - start),  # agent 0's, as published; zips with the answers
            "batch_items": [call.row] * (stop - start),
            **dict(enumerate(completions)),
        }
        keyword = {name: values[source] for name, source in self.keyword.items()}
        return [values[source] for source in self.positional], keyword


def bind(function: Callable, num_agents: int) -> Binding:
    """Reads the signature; the function is never called to find out. ValueError: no form fits, or several."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have no signature
        return Binding(tuple(range(num_agents)), {})
    parameters = list(signature.parameters.values())
    preset = function.keywords if isinstance(function, functools.partial) else {}
    named = [name for name in NAMED if name in signature.parameters and name not in preset]
    filled, overflow = _fill_slots(parameters, num_agents, named)

    positional: list[Source] = []
    keyword: dict[str, Source] = {}
    by_position, fits = True, bool(filled or overflow)
    for parameter in parameters:
        source = parameter.name if parameter.name in named else filled.get(parameter.name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += overflow
            fits &= by_position or not overflow
        elif parameter.kind is parameter.VAR_KEYWORD:
            taken = [*preset, *named, *filled.values()]
            keyword.update({name: name for name in NAMED if name not in taken})
        elif source is None:
            by_position = False  # it keeps its default, and what follows goes by keyword
        elif by_position and parameter.kind is not parameter.KEYWORD_ONLY:
            positional.append(source)
        else:
            fits &= parameter.kind is not parameter.POSITIONAL_ONLY
            keyword[parameter.name] = source
    if fits:
        return Binding(tuple(positional), keyword)
    agents = ", ".join(f"c{agent + 1}" for agent in range(num_agents))
    one_list = f"f(completions) with completions = [{agents}], " if num_agents > 1 else ""
    raise ValueError(
        f"reward_func {_name(function)}{signature} does not fit num_agents={num_agents}. Accepted forms: "
        f"f({agents}), f(prompts, {agents}), {one_list}f(*args). Parameters named `prompts` and `batch_items`"
        " and **kwargs are passed by name. Give every other parameter a default, and make it keyword-only if "
        "that default is None"
    )


def _fill_slots(
    parameters: list[inspect.Parameter], num_agents: int, named: list[str]
) -> tuple[dict[str, Source], list[int]]:
    """The sources of the parameters not in NAMED, and the agents that go to *args; empty if no form fits."""
    slots = [parameter for parameter in parameters if parameter.name not in NAMED and _can_hold(parameter)]
    names = [slot.name for slot in slots]
    required = [slot.name for slot in slots if slot.default is slot.empty]
    agents = list(range(num_agents))
    if len(required) == num_agents:
        return dict(zip(required, agents)), []
    if len(required) < num_agents and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return dict(zip(names, agents)), agents[len(names) :]
    if len(required) < num_agents == len(names):
        return dict(zip(names, agents)), []
    if len(required) == num_agents + 1 and "prompts" not in named:
        return dict(zip(required, ["prompts", *agents])), []
    if len(names) == 1 or (len(required) == 1 and len(names) < num_agents):
        return {(required or names)[0]: "completions"}, []
    return {}, []


def _can_hold(parameter: inspect.Parameter) -> bool:
    """Whether it may stand for completions; a default such as 2.0 shows that it is something else."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    optional = parameter.default is None and parameter.kind is not parameter.KEYWORD_ONLY
    return optional or parameter.default is parameter.empty


def _name(function: Callable) -> str:
    if isinstance(function, functools.partial):
        return _name(function.func)
    named = inspect.isroutine(function) or inspect.isclass(function)
    return function.__name__ if named else type(function).__name__


def _is_async(function: Callable) -> bool:
    """For functions, methods, partials, and objects with `async def __call__`."""
    if isinstance(function, functools.partial):
        return _is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


# ----------------------------------------------------------------------------------- what a call returned


def read_scores(returned: Any, size: int) -> list[Score]:
    """One score a joint sample from whatever the function returned. Raises RewardContractError."""
    if isinstance(returned, torch.Tensor | np.ndarray | np.generic):
        returned = returned.tolist()
    if inspect.iscoroutine(returned):
        returned.close()
        raise RewardContractError("returned a coroutine: declare it (or its decorator's wrapper) with `async def`")
    if size == 1 and not isinstance(returned, list | tuple):
        returned = [returned]
    if not isinstance(returned, list | tuple) or len(returned) != size:
        got = str(len(returned)) if isinstance(returned, list | tuple) else _shown(returned)
        hint = ". If it scores one joint sample at a time, set reward_batch_size: 1" if size > 1 else ""
        raise RewardContractError(f"must return a list of {size} rewards, one a joint sample; got {got}{hint}")
    return [_read_score(item) for item in returned]


def _read_score(item: Any) -> Score:
    if not isinstance(item, Mapping):
        return _number(item, "a reward"), {}
    if "reward" not in item:
        raise RewardContractError(f"must return mappings with the key 'reward'; got {_shown(item)}")
    parts = {str(key): _number(value, f"part {key!r}") for key, value in item.items() if key != "reward"}
    known = {key: value for key, value in parts.items() if value is not None}
    return _number(item["reward"], "'reward'"), known


def _number(value: Any, what: str) -> float | None:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        value = value.item()
    if value is not None and not isinstance(value, Real):  # a bool or an int is Real
        raise RewardContractError(f"must return numbers or None; {what} is {_shown(value)}")
    return None if value is None else float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:77] + '...' if len(text) > 80 else text}, of type {type(value).__name__}"


def _score(function: Callable, args: list, kwargs: dict, size: int) -> list[Score]:
    return read_scores(function(*args, **kwargs), size)


# ----------------------------------------------------------------------------------- the rewards of a turn


@dataclass(frozen=True)
class _Function:
    name: str
    run: Callable
    binding: Binding
    is_async: bool
    weight: float


@dataclass(frozen=True)
class _Job:
    """One call of one function (a number), for the joint samples start to stop - 1 of one node (a number)."""

    function: int
    node: int
    start: int
    stop: int


class Rewards:
    """Calls one or several reward functions and turns what they return into one `JointReward` a joint sample.

    functions:  one callable or a list of several. The total is their sum, weighted by `weights` (default 1
                each). With several, the reward of each is logged as part `<function name>`, its parts as
                `<function name>/<part>`. If one of them gives None, the total is None.
    processor:  float -> float, applied to the total (`reward_processor`).
    batch_size: joint samples in one call (`reward_batch_size`); None: the whole node; 1: one at a time.
    timeout:    seconds for one call of one function (`reward_timeout`). Functions that are not async then run
                in a worker process, which is forked here: build this object before models are loaded. What a
                function stores stays in the worker, and is lost when a call is killed. An async function can
                be stopped only where it awaits.
    on_error:   what happens when a function raises, runs out of time, or gives NaN or infinity
                (`reward_on_error`). "raise": the function's exception itself, TimeoutError, or ValueError.
                "skip": None for the samples of the call (for NaN the one sample; a part that is NaN is left
                out). Either way it is counted and has a line in `incidents`. A wrong length or type always
                raises a ValueError.

    counters:   `calls` of functions, of which `errors` and `timeouts`; joint `samples`; rewards returned as
                `none`; rewards and parts that were `nan` or infinite.
    incidents:  one line a failure, with function, node and samples; for the trainer to log and clear.
    """

    collective = False  # several processes divide the calls among them

    def __init__(
        self,
        functions: Callable | Sequence[Callable],
        num_agents: int,
        *,
        weights: Sequence[float] | None = None,
        processor: Callable[[float], float] | None = None,
        batch_size: int | None = None,
        timeout: float | None = None,
        on_error: str = "raise",
    ):
        callables = [functions] if callable(functions) else list(functions)
        _check_settings(callables, weights, processor, batch_size, timeout, on_error)
        self._functions = [
            _Function(name, function, bind(function, num_agents), _is_async(function), weight)
            for name, function, weight in zip(_unique_names(callables), callables, weights or [1.0] * len(callables))
        ]
        self._num_agents = num_agents
        self._processor = processor
        self._batch_size = batch_size
        self._timeout = timeout
        self._on_error = on_error
        self.counters = dict.fromkeys(("calls", "samples", "errors", "timeouts", "none", "nan"), 0)
        self.incidents: list[str] = []

        asyncs = [function.is_async for function in self._functions]
        self._worker = None
        if timeout is not None and not all(asyncs):
            self._worker = WorkerProcess([functools.partial(_score, function) for function in callables], timeout)
        # One event loop for all turns: a user's HTTP client or semaphore is bound to the first it meets.
        self._loop = asyncio.new_event_loop() if any(asyncs) else None
        self._release = weakref.finalize(self, _release, os.getpid(), self._worker, self._loop)

    def __call__(self, calls: Sequence[RewardCall]) -> list[list[JointReward]]:
        """The rewards of all nodes of one turn: [call][joint sample]. All async calls run at once."""
        if not self._release.alive:
            raise RuntimeError("these rewards are closed")
        jobs = [job for node, call in enumerate(calls) for job in self._jobs(node, call)]
        results = {}
        for job in jobs:
            if not self._functions[job.function].is_async:
                results[job] = self._settle(job, calls[job.node], self._run(job, calls[job.node]))
        if waiting := [job for job in jobs if self._functions[job.function].is_async]:
            results.update(zip(waiting, self._run_loop(self._gather(waiting, calls))))

        scores: list[list[list[Score]]] = [[[] for _ in self._functions] for _ in calls]
        for job in jobs:  # a node's chunks are in order
            scores[job.node][job.function] += results[job]
        return [
            [self._total(call, sample, each) for sample, each in zip(call.sample_ids, zip(*by_function))]
            for call, by_function in zip(calls, scores)
        ]

    def close(self) -> None:
        """Ends the worker process and the event loop. Without it they end with this object or with Python."""
        self._release()

    def _jobs(self, node: int, call: RewardCall) -> list[_Job]:
        count = len(call.sample_ids)
        assert [len(answers) for answers in call.completions] == [count] * self._num_agents, call.name
        self.counters["samples"] += count
        size = self._batch_size or max(count, 1)
        return [
            _Job(function, node, start, min(start + size, count))
            for start in range(0, count, size)
            for function in range(len(self._functions))
        ]

    def _run(self, job: _Job, call: RewardCall) -> list[Score] | Exception:
        function = self._functions[job.function]
        args, kwargs = function.binding.arguments(call, job.start, job.stop)
        self.counters["calls"] += 1
        try:
            if self._worker is None:
                return _score(function.run, args, kwargs, job.stop - job.start)
            return self._worker.call(job.function, args, kwargs, job.stop - job.start)
        except WorkerClosed:  # not the function's failure
            raise
        except UnpicklableArguments as error:
            fix = "keep plain data in the rows, or set reward_timeout: null"
            return RewardContractError(f"gets arguments that cannot be sent to the worker process: {error}; {fix}")
        except Exception as error:
            return error

    async def _run_async(self, job: _Job, call: RewardCall) -> list[Score] | Exception:
        function = self._functions[job.function]
        args, kwargs = function.binding.arguments(call, job.start, job.stop)
        self.counters["calls"] += 1
        try:
            returned = await self._within_limit(function.run(*args, **kwargs))
            return read_scores(returned, job.stop - job.start)
        except Exception as error:
            return error

    async def _within_limit(self, coroutine: Coroutine) -> Any:
        """What the coroutine returns, or raises; TimedOut at the time limit."""
        task = asyncio.ensure_future(coroutine)
        try:
            await asyncio.wait({task}, timeout=self._timeout)
            if not task.done():
                raise TimedOut
            if task.cancelled():
                raise RuntimeError("the function cancelled itself")
            return task.result()
        finally:
            if not task.done():
                task.cancel()  # one that refuses to end is left behind
                await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
            elif not task.cancelled():
                task.exception()  # asyncio complains about one that nobody read, such as a Ctrl-C

    async def _gather(self, jobs: list[_Job], calls: Sequence[RewardCall]) -> list[list[Score]]:
        async def one(job: _Job) -> list[Score]:
            return self._settle(job, calls[job.node], await self._run_async(job, calls[job.node]))

        tasks = [asyncio.create_task(one(job)) for job in jobs]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            return [task.result() for task in tasks if task.done()]  # raises, unless all are done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _run_loop(self, coroutine: Coroutine) -> Any:
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        if not _thread_runs_a_loop():
            try:
                return self._loop.run_until_complete(task)
            except (KeyboardInterrupt, SystemExit):
                self.close()  # cancels what still runs
                raise
        with ThreadPoolExecutor(1) as pool:  # a notebook: its thread is busy with a loop of its own
            future = pool.submit(self._loop.run_until_complete, task)
            try:
                return future.result()
            except BaseException:  # also the notebook's interrupt
                self._loop.call_soon_threadsafe(task.cancel)
                raise

    def _settle(self, job: _Job, call: RewardCall, outcome: list[Score] | Exception) -> list[Score]:
        """Counts, and applies the policy for failures."""
        name, ids = self._functions[job.function].name, call.sample_ids[job.start : job.stop]
        if isinstance(outcome, RewardContractError):
            raise RewardContractError(f"reward function {name} {outcome} ({_where(call, ids)})") from None
        if isinstance(outcome, TimedOut):
            late = TimeoutError(f"no answer within reward_timeout={self._timeout} s ({name} on {_where(call, ids)})")
            self._fail("timeouts", name, call, ids, late)
        elif isinstance(outcome, Exception):
            self._fail("errors", name, call, ids, outcome)
        else:
            self.counters["none"] += sum(value is None for value, _ in outcome)
            return [self._finite(name, call, sample, score) for sample, score in zip(ids, outcome)]
        return [(None, {})] * len(ids)

    def _finite(self, name: str, call: RewardCall, sample: str, score: Score) -> Score:
        """The score without what is NaN or infinite, if the policy is to skip that."""
        value, parts = score
        numbers = {"the reward": value, **{f"part {part!r}": number for part, number in parts.items()}}
        for what, number in numbers.items():
            if number is not None and not math.isfinite(number):
                error = ValueError(f"{what} is {number} ({name} on {_where(call, [sample])})")
                self._fail("nan", name, call, [sample], error)
        finite = {part: number for part, number in parts.items() if math.isfinite(number)}
        return (value if value is not None and math.isfinite(value) else None), finite

    def _fail(self, counter: str, name: str, call: RewardCall, ids: list[str], error: Exception) -> None:
        self.counters[counter] += 1
        line = f"reward function {name} failed on {_where(call, ids)}"
        self.incidents.append(f"{line}: {type(error).__name__}: {error}")
        if self._on_error == "raise":
            add_note(error, line)
            raise error

    def _total(self, call: RewardCall, sample: str, scores: Sequence[Score]) -> JointReward:
        """Joins what each function gave one joint sample."""
        several = len(scores) > 1
        parts: dict[str, float] = {}
        for function, (value, own) in zip(self._functions, scores):
            parts |= {f"{function.name}/{part}" if several else part: number for part, number in own.items()}
            if several and value is not None:
                parts[function.name] = value
        values = [value for value, _ in scores if value is not None]
        if len(values) < len(scores):
            return JointReward(None, parts)
        total = sum(function.weight * value for function, value in zip(self._functions, values))
        if self._processor is None:
            return JointReward(self._finite("sum", call, sample, (total, {}))[0], parts)
        try:
            processed = self._processor(total)
        except Exception as error:
            self._fail("errors", "reward_processor", call, [sample], error)
            return JointReward(None, parts)
        if not isinstance(processed, Real):
            where = _where(call, [sample])
            raise RewardContractError(f"reward_processor must return a number; got {_shown(processed)} ({where})")
        return JointReward(self._finite("reward_processor", call, sample, (float(processed), {}))[0], parts)


def _where(call: RewardCall, ids: list[str]) -> str:
    return f"{call.name}, sample{'s' if len(ids) > 1 else ''} {', '.join(ids)}"


def _thread_runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _unique_names(functions: list[Callable]) -> list[str]:
    names = [_name(function) for function in functions]
    repeats = [names[:index].count(name) for index, name in enumerate(names)]
    return [f"{name}_{count + 1}" if count else name for name, count in zip(names, repeats)]


def _check_settings(
    functions: list[Callable],
    weights: Sequence[float] | None,
    processor: Callable | None,
    batch_size: int | None,
    timeout: float | None,
    on_error: str,
) -> None:
    if not functions or not all(callable(function) for function in functions):
        raise ValueError(f"reward_func={functions!r}: give a function or a list of functions")
    if weights is not None and (len(weights) != len(functions) or not all(math.isfinite(w) for w in weights)):
        raise ValueError(f"reward_weights={weights!r}: give {len(functions)} finite numbers, one a function")
    if processor is not None and not callable(processor):
        raise ValueError(f"reward_processor={processor!r}: give a function from a reward to a reward, or null")
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(f"reward_batch_size={batch_size!r}: give a whole number of at least 1, or null (whole node)")
    if timeout is not None and (type(timeout) not in (int, float) or not 0 < timeout < math.inf):
        raise ValueError(f"reward_timeout={timeout!r}: give a number of seconds above 0, or null (no limit)")
    if timeout is not None and sys.platform == "win32" and not all(_is_async(function) for function in functions):
        raise ValueError(f"reward_timeout={timeout!r}: needs fork, which Windows lacks; use an async function, or null")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"reward_on_error={on_error!r}: give 'raise' or 'skip'")


def _release(owner: int, worker: WorkerProcess | None, loop: asyncio.AbstractEventLoop | None) -> None:
    if os.getpid() != owner:  # a fork of the trainer, such as a data loader's worker, drops its copy
        return
    if worker is not None:
        worker.close()
    if loop is not None and not loop.is_closed():
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


# ----------------------------------------------------------------------------------- the range of a reward


def set_reward_range(function: Callable, low: float, high: float) -> Callable:
    """Declares the least and the greatest reward, for plots of their distribution. Returns the function."""
    function.reward_range = (low, high)  # type: ignore[attr-defined]
    return function


def resolve_reward_range(function: Callable) -> tuple[float, float] | None:
    """The declared range, or None. ValueError: not two finite numbers low < high."""
    declared = getattr(function, "reward_range", None)  # optional by contract
    if declared is None:
        return None
    try:
        low, high = (float(bound) for bound in declared)
    except (TypeError, ValueError):
        raise ValueError(f"reward_range={declared!r} of {_name(function)}: give two numbers (low, high)") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"reward_range={declared!r} of {_name(function)}: give finite numbers, low < high")
    return low, high
