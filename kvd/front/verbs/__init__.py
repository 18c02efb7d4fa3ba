"""The daemon's verbs: one small class each. Work for a model (generate, warm, explain, count) is not among them: the
front forwards it unread."""

from kvd.front.verbs.base import Call, Services, Verb
from kvd.front.verbs.cache import Cache
from kvd.front.verbs.control import Cancel, Ping, Reload, Shutdown, Status
from kvd.front.verbs.models import Load, Models, Unload

_ALL: tuple[Verb, ...] = (Cache(), Cancel(), Load(), Models(), Ping(), Reload(), Shutdown(), Status(), Unload())
VERBS: dict[str, Verb] = {verb.name: verb for verb in _ALL}

__all__ = ["VERBS", "Call", "Services", "Verb"]
