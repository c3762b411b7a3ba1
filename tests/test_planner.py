"""Budgets and block plans from Python: sizes as the configuration has them, plans as they are used.

That no other set keeps more is shown in tests/cpp/pager/memory_planner_test.cpp.
"""

import pytest
import torch
from real_runner import needs_extension, run_real

import trainstream
from trainstream import Budget, BudgetError, MemoryPlanner

pytestmark = [needs_extension, pytest.mark.any_torch]

GIB = 2**30
BLOCK = 0.55 * GIB


def plan(gib, **keys):
    """48 blocks of 0.55 GiB, and 3 GiB beside them."""
    return MemoryPlanner(Budget(vram=f"{gib}GiB", ram="1000GiB"), [BLOCK] * 48, "3GiB", **keys)


def test_budget_takes_sizes_as_the_configuration_does():
    budget = Budget(vram="24GiB", ram="auto")
    assert budget.device_bytes == 24 * GIB and budget.host_bytes > 0 and budget.check_memory
    assert Budget(vram=8 * GIB, ram="1GB").host_bytes == 10**9
    assert Budget("1GiB", "50%").host_bytes > 2**20
    assert repr(Budget(2**30, 2**20)) == "Budget(vram=1073741824, ram=1048576, check_memory=True)"
    with pytest.raises(trainstream.ConfigError, match="bad value 'lots' for key 'vram'"):
        Budget(vram="lots")
    with pytest.raises(trainstream.ConfigError, match="for key 'ram'"):
        Budget(vram="1GiB", ram=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_budget_that_is_a_share_of_no_gpu_says_so():
    for vram in ("auto", "40%"):
        with pytest.raises(trainstream.ConfigError, match=f"vram:{vram} is a share of a GPU"):
            Budget(vram=vram)


def test_auto_is_trainstreams_own_budget_where_it_is_on(tmp_path):
    script = "print(trainstream.Budget().device_bytes, trainstream.Budget('1GiB').device_bytes)"
    result = run_real(tmp_path, script, "vram:64MiB")
    assert result.stdout == f"{64 * 2**20} {GIB}\n"


def test_check_refuses_with_every_term_unless_told_not_to():
    budget = Budget(vram="4GiB", ram="16GiB")
    budget.check(fixed="3GiB", inflight=0.5 * GIB, paged="16GiB")
    with pytest.raises(BudgetError) as refused:
        budget.check(fixed="3GiB", resident="1GiB", inflight=GIB, paged="20GiB")
    assert isinstance(refused.value, MemoryError)
    assert str(refused.value) == (
        "trainstream: the run cannot fit: device memory must hold 5.00 GiB at once (3.00 GiB "
        "outside the blocks + 1.00 GiB in blocks that stay + 1.00 GiB in flight), the budget is "
        "4.00 GiB; host memory must hold 20.00 GiB in paged blocks, the limit is 16.00 GiB. Raise "
        "vram by at least 1.00 GiB and ram by 4.00 GiB, make the batch smaller, or try all the "
        "same with check_memory=False."
    )
    Budget(vram="4GiB", ram="16GiB", check_memory=False).check(fixed="5GiB")


def test_check_says_nothing_of_a_device_that_needs_nothing():
    with pytest.raises(BudgetError) as refused:
        Budget(vram="4GiB", ram="16GiB").check(fixed=0, paged="20GiB")
    assert str(refused.value) == (
        "trainstream: the run cannot fit: host memory must hold 20.00 GiB in paged blocks, the "
        "limit is 16.00 GiB. Raise ram by at least 4.00 GiB, make the batch smaller, or try all "
        "the same with check_memory=False."
    )


def test_a_card_with_room_pages_nothing_and_smaller_ones_fit_nine_tenths():
    assert plan(80).initial_paged() == []
    for gib, least in ((24, 20), (8, 1), (4, 0)):
        paged = plan(gib).initial_paged()
        kept = 48 - len(paged)
        assert least <= kept < 48
        assert 3 * GIB + kept * BLOCK <= plan(gib).device_bytes(paged) <= 0.9 * gib * GIB
    with pytest.raises(BudgetError, match="3.55 GiB at once.*budget is 3.50 GiB"):
        plan(3.5)


def test_host_without_room_for_the_paged_blocks_is_refused():
    tight = Budget(vram="8GiB", ram="10GiB")
    with pytest.raises(BudgetError, match="vram or ram by at least"):
        MemoryPlanner(tight, [BLOCK] * 48, "3GiB")
    unchecked = Budget(vram="8GiB", ram="10GiB", check_memory=False)
    assert len(MemoryPlanner(unchecked, [BLOCK] * 48, "3GiB").initial_paged()) > 30


def test_measured_headroom_moves_blocks_back_and_a_far_larger_peak_out_again():
    """A process capped to 450 MiB, eight blocks of 50 MB, an estimate that was too high."""
    planner = MemoryPlanner(Budget(vram="450MiB", ram="8GiB"), 50e6, fixed_vram="150MB", blocks=8)
    paged = planner.initial_paged()
    assert 3 <= len(paged) < 8 and not planner.done
    first, refinements, outside = len(paged), 0, 90e6
    while not planner.done:
        paged = planner.refine(outside + 50e6 * (8 - len(paged)), set(paged))
        refinements += 1
    assert refinements <= 14 and len(paged) < first
    settled = len(paged)
    paged = planner.refine(0.93 * planner.budget.device_bytes, paged)
    assert len(paged) == settled + 1 and not planner.done
    paged = planner.refine(outside + 50e6 * (8 - len(paged)), paged)
    assert len(paged) == settled + 1 and planner.done


def test_spread_is_even_and_deterministic():
    assert MemoryPlanner.spread(3, range(12)) == [2, 6, 10]
    assert MemoryPlanner.spread(2, ["a", "b", "c", "d"]) == ["b", "d"]
    assert MemoryPlanner.spread(0, []) == []
    assert MemoryPlanner.spread(4, "abcd") == list("abcd")
    for k in (-1, 5):
        with pytest.raises(ValueError, match="for k; allowed: 0 to 4"):
            MemoryPlanner.spread(k, range(4))


def test_frames_default_to_two_of_the_largest_blocks():
    budget = Budget(vram="1GiB", ram="8GiB")
    assert MemoryPlanner(budget, ["100MiB", "300MiB", 2**20]).inflight_bytes == 600 * 2**20
    assert MemoryPlanner(budget, [2**20] * 3, 0, "5MiB").inflight_bytes == 5 * 2**20


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ((None, [1]), {}),
        (("24GiB", [1]), {}),
        ((Budget, []), {}),
        ((Budget, [1, 0]), {}),
        ((Budget, [1, "lots"]), {}),
        ((Budget, [float("nan")]), {}),
        ((Budget, [True]), {}),
        ((Budget, 5), {}),
        ((Budget, 5), {"blocks": 0}),
        ((Budget, [5]), {"blocks": 1}),
        ((Budget, [5], -1), {}),
        ((Budget, [5], 0, "x"), {}),
        ((Budget, [2**62, 2**62]), {}),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(arguments, keys):
    arguments = [Budget("1GiB", "1GiB") if a is Budget else a for a in arguments]
    with pytest.raises(ValueError, match="^bad value .* for .*; allowed: "):
        MemoryPlanner(*arguments, **keys)


def test_refine_refuses_what_is_no_measurement():
    planner = plan(24)
    for peak, paged in ((-1, []), ("x", []), (GIB, [48]), (GIB, [-1]), (GIB, [3, 3])):
        with pytest.raises(ValueError):
            planner.refine(peak, paged)
