"""Nothing in `router.adapters` may block the loop."""

from tests.blocking import blocking_calls_fail as blocking_calls_fail
