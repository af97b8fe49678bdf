"""What leaves a learner beside HELLO, INIT and heartbeats: pushes, FINAL_ACK, BUDGET_DONE.

Everything runs on the network thread's loop, encoding in a worker thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.errors import BudgetFailed, NonFiniteParameters
from learner.events import PushSent
from learner.feedback import Feedback
from learner.fragments import Answer
from learner.shared import Shared
from wire.group import Group
from wire.messages import BudgetDone, FinalAck, PullRequest, PushFragment
from wire.tensors import NonFiniteValues


@dataclass(frozen=True, slots=True)
class Push:
    """One delta on its way: the answer it belongs to, and d of L22, encoded or in own memory."""

    answer: Answer[Tensor]
    delta: Tensor | memoryview


class Outgoing:
    """Queues and sends; a message of an old generation is dropped (L12)."""

    def __init__(
        self,
        learner_id: int,
        shared: Shared,
        feedback: Feedback,
        executor: Executor,
        *,
        blame: Callable[[int, Tensor], str],
        group_of: Callable[[int], Group | None],
    ) -> None:
        """
        Args:
            learner_id: repeated in every PUSH.
            shared: session, lock and reports.
            feedback: encoder of deltas.
            executor: runs the encoder.
            blame: says which tensor makes a delta unsendable (L27).
            group_of: the open group of a generation.
        """
        self._learner_id = learner_id
        self._shared = shared
        self._feedback = feedback
        self._executor = executor
        self._blame = blame
        self._group_of = group_of
        self._waiting: dict[int, Push] = {}
        self._encoding: asyncio.Task[None] | None = None
        self._confirming: set[asyncio.Task[None]] = set()

    def push(self, push: Push) -> None:
        """Encode and send; a newer one for the fragment replaces one that waits (W49)."""
        fragment = push.answer.pull.fragment
        # Re-inserted at the end: deltas are encoded in the order of the PULLs they answer.
        self._waiting.pop(fragment, None)
        self._waiting[fragment] = push
        if self._encoding is None or self._encoding.done():
            self._encoding = asyncio.create_task(self._encode_all())

    def drop_pushes(self) -> None:
        """The group is gone, and with it every push that waits."""
        self._waiting.clear()

    def acknowledge(self, group: Group) -> None:
        """The cut is applied: FINAL_ACK of the known manifest (L32)."""
        if group.closed:
            return
        with self._shared.gate:
            manifest = self._shared.session.manifest
            self._shared.session.ack_begun(group.generation)
        if manifest is None:
            raise RuntimeError("FINAL_ACK without a manifest")
        group.send_control(FinalAck(manifest.step))
        self._follow(self._confirm_acknowledged(group))

    def report_budget(self, generation: int, steps: int) -> None:
        """BUDGET_DONE, once; a group that is gone by now is fatal (L40)."""
        group = self._group_of(generation)
        if group is None:
            self._shared.fail(_lost_report())
            return
        group.send_control(BudgetDone(steps))
        self._follow(self._confirm_reported(group.control_sent()))

    async def stop(self) -> None:
        """End what is being encoded or awaited."""
        self.drop_pushes()
        tasks = (
            [*self._confirming] if self._encoding is None else [*self._confirming, self._encoding]
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- pushes -------------------------------------------------------------------------------

    async def _encode_all(self) -> None:
        while self._waiting:
            push = self._waiting.pop(next(iter(self._waiting)))
            if self._group_of(push.answer.generation) is not None:
                await self._encode_and_send(push)

    async def _encode_and_send(self, push: Push) -> None:
        answer, delta = push.answer, push.delta
        loop = asyncio.get_running_loop()
        pull = answer.pull
        try:
            payload, norm = await loop.run_in_executor(self._executor, self._encode, pull, delta)
        except NonFiniteValues:
            if isinstance(delta, Tensor):
                self._shared.fail(NonFiniteParameters(self._blame(pull.fragment, delta)))
            return
        group = self._group_of(answer.generation)
        if group is not None:
            self._send(group, answer, payload, norm)

    def _encode(self, pull: PullRequest, delta: Tensor | memoryview) -> tuple[memoryview, float]:
        """Payload and L2 norm of the delta; runs in a worker thread."""
        if isinstance(delta, memoryview):
            return delta, self._feedback.norm(delta)
        norm = float(torch.linalg.vector_norm(delta))
        return self._feedback.encode(pull.fragment, pull.step, delta), norm

    def _send(self, group: Group, answer: Answer[Tensor], payload: memoryview, norm: float) -> None:
        pull = answer.pull
        message = PushFragment(
            learner_id=self._learner_id,
            fragment=pull.fragment,
            step=pull.step,
            attempt=pull.attempt,
            base_version=answer.base_version,
            local_step=answer.local_step,
            c_steps=answer.c_steps,
            c_tokens=answer.c_tokens,
            tensor=payload,
        )
        group.send_bulk(
            ("push", pull.fragment),
            message,
            on_sent=lambda: self._feedback.sent(pull.fragment, pull.step),
        )
        event = PushSent(
            fragment=pull.fragment,
            step=pull.step,
            attempt=pull.attempt,
            base_version=answer.base_version,
            c_steps=answer.c_steps,
            c_tokens=answer.c_tokens,
            size=payload.nbytes,
            delta_norm=norm,
        )
        with self._shared.gate:
            counters = self._shared.counters
            counters.pushes += 1
            counters.push_bytes += payload.nbytes
            counters.delta_norm = norm
        self._shared.advance(event)

    # -- confirmations ------------------------------------------------------------------------

    async def _confirm_acknowledged(self, group: Group) -> None:
        await group.flush()
        if not group.closed:
            with self._shared.gate:
                self._shared.acknowledged = True
            self._shared.advance()

    async def _confirm_reported(self, sent: asyncio.Future[bool]) -> None:
        # Only the report counts: the syncer closes once it has all of them, and a push that still
        # waits in another socket then is lost with its round (C72).
        if not await sent:
            self._shared.fail(_lost_report())

    def _follow(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)


def _lost_report() -> BudgetFailed:
    return BudgetFailed(
        "the connection broke before BUDGET_DONE was written; it is never sent twice"
    )
