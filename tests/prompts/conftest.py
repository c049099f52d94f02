"""Blocking calls in `router.prompts` fail the test that makes them."""

from tests.support.blocking import blocking_calls_fail as blocking_calls_fail
