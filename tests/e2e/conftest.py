"""The asserts of shared helpers say what differs, as those of the tests do."""

import pytest

pytest.register_assert_rewrite("tests.e2e.tiny_run", "tests.fault_runs")
