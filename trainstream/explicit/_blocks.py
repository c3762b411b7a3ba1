"""The blocks of a model: the layers that are paged as wholes, and what belongs to each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainstream import errors


@dataclass(frozen=True)
class Block:
    """One block.

    Args:
        name: Its path in the model, such as "model.layers.3".
        module: The module.
        tensors: Parameters and buffers whose memory is this block's alone. What blocks share, or
            what is used outside them too (tied embeddings), is in use all the time: nobody's.
    """

    name: str
    module: nn.Module
    tensors: tuple[torch.Tensor, ...]

    @property
    def params(self) -> list[nn.Parameter]:
        return [t for t in self.tensors if isinstance(t, nn.Parameter)]


def find(model: nn.Module, named: str | Sequence[str] | None) -> list[Block]:
    """The blocks of `model`, in order.

    Args:
        named: The path of a module whose children are the blocks ("model.layers"), the paths of the
            blocks, or None: the longest list of modules of one class that lies in no other one, and
            every other such list of that class; else the longest `nn.Sequential`.

    Raises:
        ValueError: A path is not one of a module, or blocks lie in each other.
    """
    modules = dict(_found(model)) if named is None else _named(model, named)
    owners = Counter()
    for module in [*modules.values(), _Rest(model, modules)]:
        owners.update({_memory(tensor) for tensor in _tensors(module)})
    blocks = []
    for name, module in modules.items():
        own = tuple(t for t in _tensors(module) if owners[_memory(t)] == 1)
        if own:
            blocks.append(Block(name, module, own))
    return blocks


def storage_bytes(tensors) -> int:
    """Bytes of the memory of `tensors`, that of several counted once."""
    return sum({_memory(t): t.untyped_storage().nbytes() for t in tensors}.values())


class _Rest:
    """What of a model is in none of `modules`."""

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module]):
        inside = {id(m) for module in modules.values() for m in module.modules()}
        self._outside = [m for m in model.modules() if id(m) not in inside]

    def parameters(self) -> Iterator[torch.Tensor]:
        return (p for m in self._outside for p in m.parameters(recurse=False))

    def buffers(self) -> Iterator[torch.Tensor]:
        return (b for m in self._outside for b in m.buffers(recurse=False))


def _tensors(module) -> list[torch.Tensor]:
    return [t for t in (*module.parameters(), *module.buffers()) if torch._C._has_storage(t)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _found(model: nn.Module) -> list[tuple[str, nn.Module]]:
    lists = list(_lists(model, ""))
    if not lists:
        mixed = (_members(m, name) for name, m in model.named_modules() if _is_list(m))
        return max(mixed, key=len, default=[])
    kind = type(max(lists, key=len)[0][1])
    return [member for members in lists if type(members[0][1]) is kind for member in members]


def _lists(module: nn.Module, name: str) -> Iterator[list[tuple[str, nn.Module]]]:
    """The members of each list of two or more modules of one class, but not of lists in those."""
    members = _members(module, name) if _is_list(module) else []
    if len(members) > 1 and len({type(m) for _, m in members}) == 1:
        yield members
        return
    for child_name, child in module.named_children():
        yield from _lists(child, f"{name}.{child_name}".lstrip("."))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _members(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Those that have parameters; each once."""
    children = dict(module.named_children()).items()
    named = [(f"{name}.{n}".lstrip("."), m) for n, m in children]
    return [(n, m) for n, m in named if next(m.parameters(), None) is not None]


def _named(model: nn.Module, named: str | Sequence[str]) -> dict[str, nn.Module]:
    if isinstance(named, str):
        members = _members(_submodule(model, named), named)
        if not members:
            raise errors.bad_argument("blocks", named, "a module whose children have parameters")
        return dict(members)
    modules = {name: _submodule(model, name) for name in named}
    inside = Counter(id(m) for module in modules.values() for m in module.modules())
    if any(inside[id(module)] > 1 for module in modules.values()):
        raise errors.bad_argument("blocks", list(named), "modules of which none lies in another")
    return modules


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except (AttributeError, TypeError):
        raise errors.bad_argument("blocks", name, "the path of a module of the model") from None
