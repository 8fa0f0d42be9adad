from tests.distributed import test_simulate_exact as t

for d in (t.CASES, t.FOUR_RANKS, t.ONE_RANK):
    for k in list(d):
        if "offload-optimizer" not in k:
            del d[k]
import pytest
from tests.distributed.test_simulate_exact import measured, prepared_cases

t.BOTH_ENDS = ()
t.MEASURED_AGAIN = 4


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [*t.CASES, *t.FOUR_RANKS, *t.ONE_RANK])
def test_it(case, measured, prepared_cases):
    t.test_live_bytes_are_those_of_real_ranks(case, measured, prepared_cases)
