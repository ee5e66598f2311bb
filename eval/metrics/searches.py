"""The two searches of LongProc, told line by line: what its prompts show, and what replies are compared with.

The wording and the order of princeton-pli/LongProc 78e873a (Apache-2.0), countdown_evaluator.py and
travel_planning_evaluator.py, which make these texts from a problem as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LARGEST = 2000  # results of countdown are smaller


class Told:
    """The lines of a search so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, depth: int, text: str) -> None:
        """Add a line, indented by its depth."""
        self.lines.append((" " * depth + "|- " if depth else "") + text)


def countdown(nums: Sequence[int], target: int) -> str:
    """The official reply: a search depth first, in the order of pairs and of + - * /, and its three equations.

    nums: four numbers. Raises ValueError if no whole results below 2,000 lead from them to the target.
    """
    search = Countdown(target)
    search.say(0, search.described(nums, "Initial"))
    steps = search.below(nums, 0)
    if steps is None:
        raise ValueError(f"nums={nums} do not lead to target={target}")
    first, second, third = steps
    return "\n".join([
        "# Search Procedure", *search.lines, "",
        "Now we have found the target, let's trace back the solution:",
        f"Final step: {third}", f"The step before: {second}", f"The first step: {first}", "",
        "Output the solution in the required format:", "<Solution>", *steps, "</Solution>", "",
    ])  # fmt: skip


def pairs(nums: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Every two of the numbers, and the others."""
    for i, one in enumerate(nums):
        for j in range(i + 1, len(nums)):
            yield one, nums[j], [*nums[:i], *nums[i + 1 : j], *nums[j + 1 :]]


def equations(big: int, small: int) -> Iterator[tuple[str, int | float | None]]:
    """The four operations on two numbers, and their results; None for a division by 0."""
    for sign, result in (("+", big + small), ("-", big - small), ("*", big * small)):
        yield f"{big} {sign} {small} = {result}", result
    if small == 0:
        yield f"{big} / {small} (invalid operation)", None
    elif big % small:
        yield f"{big} / {small} = {big / small:.1f}", big / small
    else:
        yield f"{big} / {small} = {big // small}", big // small


class Countdown(Told):
    """A search of countdown for a target."""

    def __init__(self, target: int) -> None:
        super().__init__()
        self.target = target

    def described(self, nums: Sequence[int], which: str) -> str:
        """A set of numbers, and what may be chosen of it."""
        options = [(one, two) for one, two, _ in pairs(nums)]
        choice = f". Options for choosing two numbers: {options}." if len(nums) > 2 else ", just two numbers left."
        return f"{which} number set: {list(nums)}, target: {self.target}{choice}"

    def below(self, nums: Sequence[int], depth: int) -> list[str] | None:
        """Search from these numbers on; the equations that lead to the target, None if none do."""
        picks = len(nums) > 2
        for one, two, left in pairs(nums):
            if picks:
                self.say(depth + 1, f"Pick two numbers ({one}, {two}) (numbers left: {left}). Try possible operations.")
            for equation, result in equations(max(one, two), min(one, two)):
                steps = self.tried(equation, result, left, depth + 1 + picks)
                if steps is not None:
                    return [equation, *steps]
        return None

    def tried(self, equation: str, result: int | float | None, left: list[int], depth: int) -> list[str] | None:
        """Tell what an equation leads to, and search on; the equations that follow it, None if it is dropped."""
        if result is None:
            found = ""
        elif result % 1:
            found = f"{result:.1f} is a decimal, "
        elif result >= LARGEST:
            found = f"{result} exceeds the maximum intermediate result, "
        elif left:
            nums = [int(result), *left]
            self.say(depth, f"Try {equation}. Add {result} to the number set. {self.described(nums, 'Current')}")
            return self.below(nums, depth)
        elif result == self.target:
            self.say(depth, f"Try {equation}. Evaluate {result} == {self.target}, target found!")
            return []
        else:
            found = f"Evaluate {result} != {self.target}, "
        self.say(depth, f"Try {equation}. {found}drop this branch.")
        return None


def travel(trip: Mapping[str, Any]) -> str:
    """The official reply: a search depth first, from day to day and city to city, and the plan that it finds.

    trip: num_cities, constraints, connected_cities and ground_truth_plan, as in travel_planning_all.json. Raises
    ValueError if the search finds another plan than the trip's, or none.
    """
    search = Travel(trip)
    plan = search.below(1, [], search.free) or []
    shown = []
    for number, stop in enumerate(plan):
        if number:
            shown.append(f"**Day {stop.first}:** Fly from {plan[number - 1].city} to {stop.city}.")
        visit = "Visit" if number else f"Arriving in {stop.city} and visit"
        shown.append(f"**Day {stop.first}-{stop.last}:** {visit} {stop.city} for {stop.days} days.")
    if [text.strip() for text in trip["ground_truth_plan"].split("\n\n")[1:2]] != ["\n".join(shown)]:
        raise ValueError("its constraints lead to another plan than its ground_truth_plan")
    return "\n".join([
        "<Solving Procedure>", *search.lines, "</Solving Procedure>", "",
        "Output the plan in the required format:", "<Plan>", *shown, "</Plan>",
    ])  # fmt: skip


@dataclass(frozen=True)
class Stop:
    """A city of a plan, its first day, and how many days it is visited."""

    city: str
    first: int
    days: int

    @property
    def last(self) -> int:
        """The last day."""
        return self.first + self.days - 1


def listed(cities: Sequence[str]) -> str:
    """Cities as a search tells them."""
    return f"[{', '.join(cities)}]"


class Travel(Told):
    """A search of travel planning. Raises ValueError for a constraint without its days."""

    def __init__(self, trip: Mapping[str, Any]) -> None:
        super().__init__()
        try:
            stays = {one["city"]: one["num_days"] for one in trip["constraints"] if one["type"] == "duration"}
            fixed = [
                Stop(one["city"], one["start_day"], one["end_day"] - one["start_day"] + 1)
                for one in trip["constraints"]
                if one["type"] == "fixed"
            ]
        except KeyError as error:
            raise ValueError(f"a constraint has no {error}") from None
        self.cities: int = trip["num_cities"]
        self.flights = {(start, end) for start, end in trip["connected_cities"]}
        self.fixed = sorted(fixed, key=lambda stop: stop.first)
        dates = {stop.city: f"Fixed Schedule: Day {stop.first} - {stop.last}." for stop in self.fixed[::-1]}
        self.free = {city: days for city, days in stays.items() if city not in dates}
        self.say(0, "Read the requirements and identify the cities that have fixed schedules and the cities that need "
                    "to be arranged.")  # fmt: skip
        for city, days in stays.items():
            self.say(0, f"* City: {city}, Duration: {days} days" + (f", {dates[city]}" if city in dates else "."))
        self.say(0, "\nCities that have fixed schedules" + (" (sorted by their arrival days):" if dates else ": None."))
        for stop in self.fixed:
            self.say(0, f"* City: {stop.city}, Fixed Schedule: Day {stop.first} - {stop.last}.")
        self.say(0, "\nCities needing arrangement:" + ("" if self.free else " None."))
        for city, days in self.free.items():
            self.say(0, f"* City: {city}, Duration: {days} days.")
        self.say(0, "")

    def below(self, day: int, plan: list[Stop], free: Mapping[str, int]) -> list[Stop] | None:
        """Search from a day and a plan so far; the whole plan, None if there is none."""
        depth = 2 * len(plan)
        self.say(depth, f"Current day: {day}. Current plan: {listed([stop.city for stop in plan])}.")
        if len(plan) == self.cities:
            self.say(depth, f"All {len(plan)} cities are arranged. Complete plan is found!")
            return plan
        self.say(depth, f"Check whether the city with an arrival day of Day {day} - is fixed.")
        options = [stop for stop in self.fixed if stop.first == day][:1]
        if options:
            city = options[0].city
            self.say(depth, f"Yes. The city with an arrival day of Day {day} - is fixed: {city}.")
        else:
            options = [Stop(city, day, days) for city, days in free.items()]
            self.say(depth, f"No. Consider possible options from cities needing arrangement: {listed(list(free))} and "
                            "explore these options in order.")  # fmt: skip
        depth += 1
        for stop in options:
            if self.fits(stop, plan, depth):
                left = {city: days for city, days in free.items() if city != stop.city}
                if (found := self.below(stop.last, [*plan, stop], left)) is not None:
                    return found
        self.say(depth, f"Fail to arrange any option on day {day} in the current arrangement. Drop this branch.")
        return None

    def fits(self, stop: Stop, plan: list[Stop], depth: int) -> bool:
        """Tell whether a stop can follow a plan: by a direct flight, and before the next fixed schedule."""
        day, before = stop.first, plan[-1].city if plan else "the starting point"
        self.say(depth, f"Try arranging to visit {stop.city} from Day {day}. Duration: {stop.days} days. Schedule: Day "
                        f"{day} - {stop.last}.")  # fmt: skip
        self.say(depth, f"Check for direct flight from {before} to {stop.city}.")
        if plan and (before, stop.city) not in self.flights:
            self.say(depth, "No. Drop this branch.")
            return False
        self.say(depth, "Yes.")
        later = next((one for one in self.fixed if one.first > day), None)
        schedule = f"{later.city} (Day {later.first} - {later.last})" if later else "None"
        self.say(depth, f"Check whether this arrangement is compatible with the next fixed schedule after Day {day}: "
                        f"{schedule}.")  # fmt: skip
        if later is None:
            self.say(depth, "No following fixed schedules. This arrangement is compatible.")
        else:
            late = stop.last > later.first
            order, verdict = (("later than (>)", "incompatible. Drop this branch.") if late else
                              ("not later than (<=)", "compatible."))  # fmt: skip
            self.say(depth, f"The departure day of {stop.city} is Day {stop.last}. The arrival day of {later.city} is "
                            f"Day {later.first}. Day {stop.last} is {order} Day {later.first}. This arrangement is "
                            f"{verdict}")  # fmt: skip
            if late:
                return False
        self.say(depth, "This arrangement is feasible for now. Continue to arrange the rest of the plan.")
        return True
