"""Nothing in `router.web` may block the loop."""

from tests.blocking import blocking_calls_fail as blocking_calls_fail
