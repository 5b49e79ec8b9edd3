"""The loop over the steps of a run.

One step: take the next batch (made ahead), hand the step to the devices, read the metrics of the
step before while this one runs, judge its loss, write it down, save if it is time. A state is saved
only once all losses up to it have been judged.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping

import jax

from shardlib.errors import ShardlibError, TrainingError
from shardlib.processes.agreement import agree
from shardlib.processes.ranks import anywhere
from shardlib.report import Finding
from shardlib.training.display import Display
from shardlib.training.measures.busy import Busy
from shardlib.training.measures.judge import Judge
from shardlib.training.stepping.equipment import equipped
from shardlib.training.stepping.feed import Feed
from shardlib.training.stepping.limits import limited_to, require_judged
from shardlib.training.stepping.numbers import Pending, meetings, numbers_of
from shardlib.training.stepping.saving import Saving
from shardlib.training.stepping.task import Task
from shardlib.training.stepping.watching import Watching


class Loop:
    """The state of a run; everything in it changes from step to step.

    Args:
        task: what the run is to do.
        display: where it is shown.
        stack: closes what the loop opens.

    Raises:
        ModelError: the policy needs a guard that the program has not.
        RunError: the folder holds another run.
        OwnedError: another process writes to the folder.
    """

    def __init__(self, task: Task, display: Display, stack: contextlib.ExitStack) -> None:
        require_judged(task)
        self.task, self.display, self.stack = task, display, stack
        self.open = equipped(task, stack, display.say)
        self.records, self.saving = self.open.records, self.open.saving
        self.stop, self.watchdog = self.open.stop, self.open.watchdog
        self.watching = Watching(task, self.records, display)
        self.judge, self.offset, self.rollbacks = Judge(task.settings.policy), 0, 0
        self.limits = task.settings.policy.action == "skip"
        self.step = self.resumed = 0
        # Several executions in flight starve the threads with which CPU devices meet; elsewhere one
        # step runs while the metrics of the one before are read.
        self.ahead = 0 if jax.default_backend() == "cpu" else 1
        self.pending: deque[Pending] = deque()
        self.waited = 0.0
        self.feed = Feed(task)
        self.noticed: tuple[Finding, ...] = ()

    def run(self) -> None:
        """All steps, or as many as there are until somebody wants the run to stop."""
        self._begin()
        with self.display:
            self.clock = time.perf_counter()
            if self.saving is not None:
                self.saving.saved_at = self.clock
            self.busy = Busy(alone=jax.process_count() == 1)
            try:
                while self.step < self.task.steps and not self._stopping():
                    self._one()
                    self._validate()
                    if self.saving is not None and self._save_due(self.saving):
                        self._save(self.saving)
                self._settle(0)
                self.watching.end(self.step, self.state)
            except KeyboardInterrupt:
                self._say_stopped("SIGINT")
                raise
            except Exception:
                if self.watching.failed and self.saving is not None:
                    self._save_last(self.saving)
                raise
            self._end()
        self.feed.close()

    def _begin(self) -> None:
        """The first state: a new one, or that of the newest good checkpoint."""
        self.open.agree_and_examine(self.task, self.display.say)
        with self.watchdog.phase("compile", patience=10):
            for _, program in self.task.programs:
                program.prepare()
        if self.saving is not None:
            self.saving.prepare()
        found = self.saving is not None and self.saving.found()
        with self.watchdog.phase("restore" if found else "init", patience=10):
            if self.saving is not None and found:
                self._restore(self.saving)
                self.resumed = self.saving.saved = self.step
            else:
                self.state = self.task.program.init(self.task.seed)
        with self.watchdog.phase("agree", patience=10):
            agree(
                "position",
                {
                    "step": str(self.step),
                    "batches left out": str(self.offset),
                    "checkpoint": str(found),
                },
            )
        self.open.open_records(self.task, self.step, self.stack)
        if found:
            self.records.event("resumed", self.step)
            self._note()
            self.display.resumed(self.step, self.task.steps)
        else:
            self.watching.remember({})
        self.watching.begin(self.step, self.state)

    def _one(self) -> None:
        """Hands one step to the devices, and settles those that are more than `ahead` behind."""
        begin = time.perf_counter()
        with self.watchdog.phase("data", self.step):
            batch = self.feed.next(self.step, self.offset)
        got = time.perf_counter()
        self.open.profiler.before(self.step + 1)
        if self.limits:
            self.state = limited_to(self.state, self.judge.limit())
        with self.watchdog.phase("step", self.step):
            self.state, metrics = self.task.at(self.step).step(self.state, batch)
            self.step += 1
            times = {"data_seconds": got - begin, "dispatch_seconds": time.perf_counter() - got}
            self.pending.append(Pending(step=self.step, metrics=metrics, times=times))
            self.waited += got - begin
            self._settle(self.ahead)

    def _settle(self, ahead: int) -> None:
        """Reads, judges and writes down all pending steps but the last `ahead`."""
        while len(self.pending) > ahead:
            one = self.pending.popleft()
            numbers = numbers_of(one.metrics, self.judge.policy.metric)
            now = time.perf_counter()
            seconds, self.clock = now - self.clock, now
            judged = numbers[self.judge.policy.metric]
            if not self._judged(one.step, judged, bool(numbers.get("skipped"))):
                return
            self._write_down(one, numbers, seconds)

    def _write_down(self, one: Pending, numbers: Mapping[str, float], seconds: float) -> None:
        """A step that was judged to be good."""
        records, loss = self.records, numbers["loss"]
        records.losses[one.step], records.seconds[one.step] = loss, seconds
        added = self.watching.step(one.step, numbers, self.state)
        self.open.profiler.after(one.step)
        busy = self.busy.recent()
        records.write(
            {
                "step": one.step,
                **numbers,
                **added,
                "seconds": seconds,
                **one.times,
                **meetings(self.task.program.plan, one.step),
                "tokens_per_second": self.display.tokens / seconds,
                **({"others_busy": busy} if busy is not None else {}),
            }
        )
        self.display.step(one.step, loss, seconds)
        if numbers.get("skipped"):
            records.skipped(one.step, numbers["skipped"])

    def _judged(self, step: int, loss: float, skipped: bool) -> bool:
        """Whether the loop goes on from here; if not, it has gone back."""
        verdict = self.judge.skip() if skipped else self.judge.see(loss)
        if verdict in ("go", "warn"):
            if verdict == "warn":
                self.records.event("spike", step, loss=loss)
                self.display.say(f"the loss of step {step} is {loss:.3f}, far above those before")
            return True
        what, advice = f"the loss of step {step} of {self.task.steps} is {loss:g}", self.task.advice
        if verdict == "stop" or self.saving is None or not self.saving.kept():
            raise TrainingError(f"{what}\nTry: {advice}")
        if self.rollbacks >= self.task.settings.policy.attempts:
            raise TrainingError(
                f"{what}, after the run went back {self.rollbacks} times to step"
                f" {self.saving.saved} and past other batches\nTry: {advice}"
            )
        self._roll_back(self.saving, step, loss)
        return False

    def _roll_back(self, saving: Saving, step: int, loss: float) -> None:
        """Back to the newest checkpoint, and past all batches since."""
        self.pending.clear()
        ahead = step + self.offset
        with self.watchdog.phase("restore", patience=10):
            self._restore(saving)
        self.rollbacks += 1
        self.offset = ahead - self.step
        self.records.forget_after(self.step)
        self._note()
        self.feed.close()
        left_out = step - self.step
        self.records.event(
            "rolled-back", self.step, loss=loss, bad_step=step, batches_left_out=left_out
        )
        self.display.say(
            f"the loss of step {step} is {loss:g}: back to step {self.step}, and past"
            f" {left_out} batches"
        )

    def _restore(self, saving: Saving) -> None:
        restored = saving.restore()
        self.state, self.step = restored.state, restored.step
        self.offset = int(restored.extra["offset"])
        self.watching.remember(restored.extra.get("callbacks", {}))
        self.judge = Judge(self.task.settings.policy, map(float, restored.extra["seen"]))
        self.noticed = restored.findings
        for finding in restored.findings:
            self.display.say(finding.message)

    def _note(self) -> None:
        """Writes down what was noticed when a state was restored."""
        for finding in self.noticed:
            self.records.event("noticed", self.step, code=finding.code, message=finding.message)

    def _validate(self) -> None:
        """Validates the state where that is due, once all losses up to it have been judged."""
        before = self.step
        if not self.watching.due(before):
            return
        self._settle(0)
        if self.step != before:
            return
        begin = time.perf_counter()
        with self.watchdog.phase("validate", self.step, patience=10):
            self.watching.validate(self.step, self.state)
        self.clock += time.perf_counter() - begin

    def _save_due(self, saving: Saving) -> bool:
        asked, self.watching.wants_save = self.watching.wants_save, False
        return (asked and self.step != saving.saved) or saving.due(self.step)

    def _save_last(self, saving: Saving) -> None:
        """Saves what a failure would lose; that this fails, too, does not hide the failure."""
        with contextlib.suppress(ShardlibError):
            if self.step != saving.saved:
                self._save(saving, wait=True)
            saving.wait()

    def _save(self, saving: Saving, *, wait: bool = False) -> None:
        """Saves the state, once all losses up to it have been judged."""
        before = self.step
        self._settle(0)
        if self.step != before:
            return  # a pending loss was bad, and the loop has gone back
        spent = saving.seconds
        extra = {
            "offset": self.offset,
            "seen": [*self.judge.seen],
            "seed": self.task.seed,
            "callbacks": self.watching.memory(),
        }
        if saving.save(self.step, self.state, extra, wait=wait):
            self.rollbacks = 0
        self.clock += saving.seconds - spent

    def _end(self) -> None:
        """The last checkpoint, and what there is to say."""
        if self.saving is not None:
            if self.step != self.saving.saved:
                self._save(self.saving, wait=True)
            self.saving.wait()
        if self.step < self.task.steps and self.watching.reason and not self.stop:
            self.watching.ended(self.step)
        elif self.step < self.task.steps:
            self.records.event("stopped", self.step, reason=self.stop.reason)
            self._say_stopped(self.stop.reason)
            if self.saving is None and self.stop.reason == "SIGINT":
                raise KeyboardInterrupt
        elif self.open.folder is not None:
            self.records.event("finished", self.step)

    def _say_stopped(self, reason: str) -> None:
        kept = self.saving.saved if self.saving is not None else None
        self.display.stopped(reason, self.step, self.records.last(), kept=kept)

    def _stopping(self) -> bool:
        if self.watching.reason:
            return True
        stopping = anywhere(bool(self.stop), needed=True, step=self.step)
        if stopping:
            self.stop.ask("another process")
        return stopping
