"""What a rank holds in a step by name, measured: storages that live between a schedule's actions, told apart by owner.

Runs in workers. Everything that an operator makes in the second step is followed until it is gone. What belongs to
weights, gradients, FSDP's buffers, messages or logits is known by identity; the rest is kept for backward.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.parallel.pipeline import execute_schedule
from lmtrain.parallel.pipeline.stage_to_stage_messages import Mailbox
from lmtrain.parallel.weights import fsdp_sharding
from lmtrain.parallel.weights.master_weights import MasterWeights
from lmtrain.schedules.table import Action
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.layouts.bugs import replaced
from tests.layouts.cases import Case
from tests.layouts.toy_data import EvenlyMasked, loader_of
from tests.layouts.training import OPTIM, build, dp_index

# because: wrappers, as of shards, have no memory of their own
WITH_MEMORY = (Tensor, nn.Parameter, FakeTensor)
Sizes = dict[int, int]  # bytes by the identity of a storage: views share one


def sizes_of(tensors: Iterable[Tensor]) -> Sizes:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}


def threads_at_rest() -> None:
    """Returns when all other threads of this process wait: gloo's let go of a tensor after they have said it is sent.

    Seen three times in a row, because one that waits for the interpreter to free a tensor runs when this one yields.
    """
    threads, own, seen = Path("/proc/self/task"), str(threading.get_native_id()), 0
    while seen < 3:
        os.sched_yield()
        states = [(one / "stat").read_text().rpartition(") ")[2][0] for one in threads.iterdir() if one.name != own]
        seen = seen + 1 if all(state == "S" for state in states) else 0


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Storages that operators have made inside the `with` and that still live; some of them noted as logits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, Any] = {}
        self.logits: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves
        given = {t.untyped_storage()._cdata for t in leaves(args) if type(t) in WITH_MEMORY}
        for tensor in leaves(result):
            if type(tensor) in WITH_MEMORY:
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in given | self.storages.keys():
                    self.storages[key] = weakref.ref(storage)
                    weakref.finalize(storage, self._gone, key)
        return result

    def _gone(self, key: int) -> None:
        self.storages.pop(key, None)
        self.logits.discard(key)  # because: another storage may come to stand at the same address

    def note_logits(self, tensor: Tensor) -> None:
        self.logits.add(tensor.untyped_storage()._cdata)

    def sizes(self) -> Sizes:
        """As they are now: FSDP frees by shrinking a storage to nothing."""
        return {key: storage.nbytes() for key, ref in list(self.storages.items()) if (storage := ref()) is not None}


class Ledger:
    """The most of each name at any look, and at the last one."""

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.living = model, Living()
        self.posts: list[Mailbox] = []
        self.buffers: Sizes = {}
        self.allocated: dict[str, list[int]] = defaultdict(list)  # by who asked for a buffer
        self.most: dict[str, int] = defaultdict(int)
        self.last: dict[str, int] = {}

    def look(self) -> None:
        threads_at_rest()
        gc.collect()
        self.last = self._look()
        for name, size in self.last.items():
            self.most[name] = max(size, self.most[name])

    def _look(self) -> dict[str, int]:
        owned = {
            "weights": sizes_of(self.gathered_weights()), "gradients": sizes_of(self.gradients()),
            "messages": sizes_of(self.messages()), "buffers": dict(self.buffers),
        }  # fmt: skip
        known = {key for sizes in owned.values() for key in sizes}
        living = {key: size for key, size in self.living.sizes().items() if key not in known}
        owned["logits"] = {key: size for key, size in living.items() if key in self.living.logits}
        owned["activations"] = {key: size for key, size in living.items() if key not in self.living.logits}
        return {name: sum(sizes.values()) for name, sizes in owned.items()}

    def gathered_weights(self) -> Iterator[Tensor]:
        for one in self._sharded():
            yield from getattr(one, "all_gather_outputs", ())
            if hasattr(one, "_unsharded_param"):
                yield one._unsharded_param

    def gradients(self) -> Iterator[Tensor]:
        """Autograd's own, sums that wait for the last microbatch, and shares that wait for the other copies'."""
        yield from (p.grad for p in self.model.parameters.values() if p.grad is not None)
        yield from (sums for group in self._groups() if (sums := group._partial_reduce_output) is not None)
        for one in self._sharded():
            whole = getattr(getattr(one, "_unsharded_param", None), "grad", None)
            for grad in (whole, one.unsharded_accumulated_grad, one.sharded_param.grad):
                if grad is not None:
                    yield getattr(grad, "_local_tensor", grad)

    def messages(self) -> Iterator[Tensor]:
        for post in self.posts:
            for box in post.inboxes.values():
                yield from (tensor for _, tensor, _ in box.posted)
                yield from box.arrived.values()
            for outbox in post.outboxes.values():
                yield from (tensor for _, _, tensor in outbox.in_flight)
            yield from post.local_messages.values()

    def allocate(self, kind: str, tensor: Tensor) -> None:
        """A buffer that FSDP asks for."""
        storage = tensor.untyped_storage()
        self.allocated[kind].append(storage.nbytes())
        self.buffers[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, self.buffers.pop, storage._cdata, None)
        self.most["weights"] = max(self.most["weights"], sum(sizes_of(self.gathered_weights()).values()))

    def _groups(self) -> Iterator[Any]:
        for stage in self.model.stages.values():
            assert isinstance(stage, nn.Module)
            for module in stage.modules():
                if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
                    yield group

    def _sharded(self) -> Iterator[Any]:
        for group in self._groups():
            yield from group.fsdp_params


@contextmanager
def following(ledger: Ledger) -> Iterator[None]:
    """Looks before and after every action, and notes logits, messages and buffers as they come."""
    objective, runner = ledger.model.objective, cast(Any, ledger.model.runner)
    entropy, train = objective.cross_entropy, runner.train

    def train_and_look(*args: Any) -> Any:
        watch = args[-1]
        begin, done = watch.before_action, watch.after_action

        def look_and_begin(action: Action) -> None:
            ledger.look()
            begin(action)

        def do_and_look(action: Action) -> None:
            done(action)
            ledger.look()

        watch.before_action, watch.after_action = look_and_begin, do_and_look
        return train(*args)

    def noted(logits: Tensor, labels: Tensor, num_samples: int = 0, z_loss: float = 0.0) -> Tensor:
        ledger.living.note_logits(logits)
        logits.register_hook(ledger.living.note_logits)  # type: ignore[no-untyped-call]
        return entropy(logits, labels, num_samples=num_samples, z_loss=z_loss)

    class Noted(Mailbox):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            ledger.posts.append(self)

    def allocate(self: object, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(*size, dtype=dtype, device=device)
        ledger.allocate(type(self).__name__, tensor)
        return tensor

    gc.collect()
    gc.freeze()  # because: a look then goes through what has come since, and not through all of torch
    runner.train, objective.cross_entropy = train_and_look, noted
    with ExitStack() as stack:
        stack.enter_context(replaced(execute_schedule, "Mailbox", Noted))
        stack.enter_context(replaced(fsdp_sharding._TracedCollective, "allocate", allocate))
        stack.enter_context(ledger.living)
        yield
    gc.unfreeze()


def measure(name: str) -> dict[str, int]:
    """Bytes by the names of plan.ranks, of the second step."""
    case = Case.named(name)
    model = build(case)
    optimizer = build_optimizer(OPTIM, model)
    loader = loader_of(case, dp_index(case), EvenlyMasked)
    train_step(model, optimizer, loader.read(0), OPTIM.lr, OPTIM.clip_norm)
    ledger = Ledger(model)
    with following(ledger):
        model.forward_backward(loader.read(1))
    masters = sizes_of(model.parameters.values())
    slots = sizes_of(t for state in optimizer.state.values() for t in state.values() if t.ndim)
    found = {key: ledger.most[key] for key in ("weights", "gradients", "activations", "logits", "messages")}
    found |= {"masters": sum(masters.values()), "moments": sum(slots.values())}
    if isinstance(model.masters, MasterWeights):
        work = sizes_of(model.masters.work.values())
        found["weights"] = sum(size for key, size in work.items() if key not in masters)
    elif case.microbatches == 1:  # reduced as soon as they are made: nothing adds up
        found["gradients"] = ledger.last["gradients"]
    sums = ledger.allocated["_ReduceScatter"]  # what goes in, what comes out, in turn
    found["gathered"] = max(ledger.allocated["_AllGather"], default=0)
    found["gathered"] += max(map(sum, zip(sums[::2], sums[1::2], strict=True)), default=0)
    if case.zero == 3:
        found["gathered"], found["weights"] = found["gathered"] + found["weights"], 0
    return found
