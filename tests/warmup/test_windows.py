"""The windows of warmup."""

import pytest

from numpyro_repulsion.warmup import Timetable, Window
from numpyro_repulsion.warmup.arrival import most_late_iterations


def windows(timetable):
    """All windows of a warmup, in order."""
    return [Window(timetable, n) for n in range(1, timetable.num_warmup + 1) if timetable.is_end(n)]


def test_windows_of_warmup():
    timetable, ends = Timetable(100), [1, 2, 5, 10, 15, 25, 30, 40, 60, 65, 70, 75, 80, 85, 90, 95, 100]
    found = windows(timetable)
    assert [window.ends for window in found] == [n for n in range(1, 120) if timetable.is_end(n)] == ends
    assert [n for n in range(120) if timetable.is_arriving(n)] == list(range(25))
    assert [window.ends for window in found if window.was_arrival] == [1, 2, 5, 10, 15, 25]
    assert [window.ends for window in found if not window.is_adapting] == ends[9:]
    assert [window.ends for window in found if window.moves_references] == [25, 30, 40, 60]
    assert [Window(timetable, n).num_settled for n in (64, 65, 70, 100, 101)] == [0, 1, 2, 8, 8]
    # Sums count in the second half of a window, later in its last three quarters.
    begins = [n for n in range(120) if timetable.is_beginning(n)]
    assert begins == [1, 3, 7, 12, 20, 26, 32, 45, 70]
    for n in range(100):
        assert timetable.next_end(n) == next(end for end in ends if end > n)
        assert timetable.next_stop(n) == next(stop for stop in sorted({*ends, *begins}) if stop > n)


def test_windows_of_a_prolonged_arrival():
    timetable = Timetable(1000, True)
    later = [window for window in windows(timetable) if window.ends > 250]
    assert [n for n in range(250, 1000) if timetable.is_arriving(n)] == list(range(250, 800))
    ends = [800, 813, 840, 893, 906, 920, 933, 946, 960, 973, 986, 1000]
    assert [window.ends for window in later] == ends
    assert [window.ends for window in later if window.moves_references] == [800, 813, 840, 893]
    assert [window.ends for window in later if not window.is_adapting] == ends[4:]
    assert {timetable.half_of_arrival(n) for n in range(250, 800)} == {(250, 800)}
    # The mean of the positions, for the reference, is over the second half.
    assert next(n for n in range(250, 1000) if timetable.is_beginning(n)) == 525
    # A limit on its iterations shortens that half, and only shortens it.
    assert [window.ends for window in windows(Timetable(1000, True, 10**7))][-12:] == ends
    found = [window.ends for window in windows(Timetable(1000, True, 150))]
    assert found[-12:] == [400, 440, 520, 680, 720, 760, 800, 840, 880, 920, 960, 1000]
    assert not Timetable(1000, True, 150).is_arriving(400)


def test_a_prolonged_arrival_passes_through_the_rows_at_most_500_times():
    assert most_late_iterations({"rows": (1000, 100)}, num_steps=10) == 500
    assert most_late_iterations({"rows": (1000, 100), "others": (999, 10)}, num_steps=1) == 49950
    assert most_late_iterations({}, num_steps=10) is None


@pytest.mark.parametrize("num_warmup", [*range(1, 12), 50, 51, 99, 1000, 100_000, 600_000, 2_000_000_000])
def test_every_warmup_ends_with_a_measurement(num_warmup):
    timetable = Timetable(num_warmup)
    assert timetable.is_end(num_warmup) and not timetable.is_end(num_warmup + 1)
    assert timetable.next_stop(num_warmup - 1) == num_warmup
