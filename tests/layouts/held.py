"""What a rank holds in a step by name, measured: storages that live between a schedule's actions, told apart by owner.

Runs in workers. Everything that an operator makes in the second step is followed until it is gone: what belongs to
weights, gradients, FSDP's buffers, messages or logits is known by identity, and the rest is kept for backward.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmtrain.parallel import sharding
from lmtrain.parallel.model import ParallelModel
from lmtrain.parallel.pipeline import executor
from lmtrain.parallel.precision import MasterWeights
from lmtrain.plan.ours import Planned
from lmtrain.schedules.table import Action
from lmtrain.train.setup import build_optimizer
from lmtrain.train.step import train_step
from tests.layouts.bugs import _replaced
from tests.layouts.cases import Case
from tests.layouts.toy_data import loader_of
from tests.layouts.training import OPTIM, build, dp_index

PLAIN = (Tensor, nn.Parameter, FakeTensor)


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Storages that operators have made inside the `with` and that still live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, Any] = {}
        self.logits: set[int] = set()

    def _gone(self, key: int) -> None:
        self.storages.pop(key, None)
        self.logits.discard(key)  # because: another storage may stand at the same address

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if type(t) in PLAIN}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if type(tensor) in PLAIN and (key := tensor.untyped_storage()._cdata) not in given | self.storages.keys():
                storage = tensor.untyped_storage()
                self.storages[key] = weakref.ref(storage)
                weakref.finalize(storage, self._gone, key)
        return result

    def sizes(self) -> dict[int, int]:
        return {key: storage.nbytes() for key, ref in list(self.storages.items()) if (storage := ref()) is not None}


class Watch:
    """Looks before and after every action of the schedule."""

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.living = model, Living()
        self.posts: list[Any] = []
        self.buffers: dict[int, int] = {}
        self.unsharded = 0
        self.most: dict[str, int] = {}
        self.lasting: dict[str, int] = {}
        self.timeline: list[tuple[str, dict[str, int]]] = []

    def look(self, when: str) -> None:
        """`activations` is what nobody else owns: what backward needs, and a few numbers of losses."""
        gc.collect()
        owned = {"weights": self.weights(), "gradients": self.gradients(), "messages": self.messages()}
        found = {name: sizes_of(tensors) for name, tensors in owned.items()}
        known = {key for sizes in found.values() for key in sizes} | self.buffers.keys()
        living = self.living.sizes()
        found["logits"] = {key: size for key, size in living.items() if key in self.living.logits}
        known |= found["logits"].keys()
        found["activations"] = {key: size for key, size in living.items() if key not in known}
        sums = {name: sum(sizes.values()) for name, sizes in found.items()}
        self.timeline.append((when, sums))
        self.most = {name: max(size, self.most.get(name, 0)) for name, size in sums.items()}

    def groups(self) -> Iterator[Any]:
        for stage in self.model.stages.values():
            assert isinstance(stage, nn.Module)
            for module in stage.modules():
                if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
                    yield group

    def sharded(self) -> Iterator[Any]:
        for group in self.groups():
            yield from group.fsdp_params

    def weights(self) -> Iterator[Tensor]:
        for one in self.sharded():
            if hasattr(one, "_unsharded_param"):
                yield one._unsharded_param
            yield from getattr(one, "all_gather_outputs", ())

    def gradients(self) -> Iterator[Tensor]:
        """Autograd's own, those that wait for the last microbatch, and shares that wait for the other copies'."""
        yield from (p.grad for p in self.model.parameters.values() if p.grad is not None)
        yield from (sums for group in self.groups() if (sums := group._partial_reduce_output) is not None)
        for one in self.sharded():
            whole = getattr(getattr(one, "_unsharded_param", None), "grad", None)
            for grad in (whole, one.unsharded_accumulated_grad, one.sharded_param.grad):
                if grad is not None:
                    yield getattr(grad, "_local_tensor", grad)

    def messages(self) -> Iterator[Tensor]:
        for post in self.posts:
            for box in post.inboxes.values():
                yield from (tensor for _, tensor, _ in box.posted)
                yield from box.arrived.values()
            for box in post.outboxes.values():
                yield from (tensor for _, _, tensor in box.under_way)
            yield from post.own.values()


def sizes_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by storage: views share one."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}


def measure(name: str, timeline: bool = False) -> dict[str, Any]:
    case = Case.named(name)
    model = build(case)
    optimizer = build_optimizer(OPTIM, model)
    loader = loader_of(case, dp_index(case))
    train_step(model, optimizer, loader.read(0), OPTIM.lr, OPTIM.clip_norm)
    watch = Watch(model)
    right: Any = model.runner.train

    def train(*args: Any) -> Any:
        told = args[-1]
        begin, done = told.begin, told.done

        def begin_and_look(action: Action) -> None:
            watch.look(f"before {action}")
            begin(action)

        def done_and_look(action: Action) -> None:
            done(action)
            watch.look(f"after {action}")

        told.begin, told.done = begin_and_look, done_and_look
        return right(*args[:-1], told)

    entropy = model.objective.cross_entropy

    def noted(logits: Tensor, labels: Tensor) -> Tensor:
        watch.living.logits.add(logits.untyped_storage()._cdata)
        logits.register_hook(lambda grad: watch.living.logits.add(grad.untyped_storage()._cdata))
        return entropy(logits, labels)

    class Noted(executor.Post):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            watch.posts.append(self)

    buffers: dict[str, list[int]] = {"_AllGather": [0], "_ReduceScatter": [0, 0]}

    def allocate(self: Any, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(*size, dtype=dtype, device=device)
        storage = tensor.untyped_storage()
        buffers[type(self).__name__].append(storage.nbytes())
        watch.buffers[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, watch.buffers.pop, storage._cdata, None)
        watch.unsharded = max(watch.unsharded, sum(sizes_of(watch.weights()).values()))
        return tensor

    gc.collect()
    gc.freeze()  # because: a look then goes through what has come since, and not through all of torch
    model.runner.train = train  # type: ignore[method-assign]
    model.objective.cross_entropy = noted
    step = loader.read(1)
    with _replaced(executor, "Post", Noted), _replaced(sharding._Talk, "allocate", allocate), watch.living:
        model.forward_backward(step)
    gc.unfreeze()
    masters = sizes_of(model.parameters.values())
    slots = sizes_of(t for state in optimizer.state.values() for t in state.values() if t.ndim)
    found = watch.most | {"masters": sum(masters.values()), "moments": sum(slots.values())}
    if isinstance(model.masters, MasterWeights):
        work = sizes_of(model.masters.work.values())
        found["weights"] = sum(size for key, size in work.items() if key not in masters)
    if case.microbatches == 1 and case.dp > 1:
        found["gradients"] = watch.timeline[-1][1]["gradients"]
    sums = buffers["_ReduceScatter"]
    found["gathered"] = max(buffers["_AllGather"]) + max(map(sum, zip(sums[::2], sums[1::2], strict=True)))
    if case.zero == 3:
        found["gathered"] += max(watch.unsharded, found["weights"])
        found["weights"] = 0
    return found | ({"timeline": watch.timeline} if timeline else {})


def planned_of_case(case: Case) -> Planned:
    return Planned(
        model=case.model_settings, parallel=case.parallel, precision=case.precision_settings, compute=case.compute,
        optim=OPTIM, recompute=case.recompute_settings, micro_batch=case.train.micro_batch,
        global_batch=case.global_batch,
    )  # fmt: skip
