"""`trainstream.wrap`, `unwrap` and `session`: the table of wrapped models."""

import weakref

from torch import nn

from trainstream import _switch, config, errors
from trainstream.explicit._options import Options, check_objects
from trainstream.explicit._session import Session

_sessions: "weakref.WeakKeyDictionary[nn.Module, Session]" = weakref.WeakKeyDictionary()


def wrap(model: nn.Module, optimizer, options: Options) -> tuple:
    """See trainstream.wrap."""
    check_objects(model, optimizer)
    options.check()
    if model in _sessions:
        raise errors.wrapped_already()
    session = Session(model, optimizer, options, _switched_on(options.switch_keys()))
    try:
        session.start()
    except BaseException:
        session.close()
        raise
    _sessions[model] = session
    return model, optimizer


def _switched_on(keys: dict[str, object]) -> _switch.State:
    """What is on, where it is as `keys` ask; else it is switched on so."""
    state = _switch.current()
    if state is None:
        _switch.switch_on(keys)
        return _switch.current()
    if keys.get("device") == state.device:
        keys = {key: value for key, value in keys.items() if key != "device"}
    wanted = config.with_keywords(state.config, keys)
    if wanted != state.config:
        raise errors.already_enabled(str(state.config), str(wanted))
    return state


def unwrap(model: nn.Module) -> nn.Module:
    """See trainstream.unwrap."""
    session(model, "unwrap").close()
    del _sessions[model]
    return model


def session(model: nn.Module, function: str = "session") -> Session:
    """See trainstream.session."""
    found = _sessions.get(model) if isinstance(model, nn.Module) else None
    if found is None:
        raise errors.not_wrapped(function)
    return found
