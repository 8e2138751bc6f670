"""Rows of the travel task: requests, and the lists of journeys, hotels, restaurants and sights they are planned with.

A row: ``origin``; ``route``, the city in which each day is spent; ``legs``, ``[day, from, to]`` of each journey;
``people``; ``caps``, the money of each role, whose sum is the budget; ``wishes`` (perhaps ``room``, ``avoid`` a means
of transport, ``cuisine``); and four lists of entries with ``name`` and ``price``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from comlrl.tasks import Row

ROLES = [["current_city", "transportation", "accommodation"], ["breakfast", "attraction", "lunch", "dinner"]]
LISTS = ["journeys", "hotels", "restaurants", "attractions"]
FIELDS_OF = {"journeys": "leg mode", "hotels": "city room", "restaurants": "city cuisine", "attractions": "city"}

CITIES = ["Arvika", "Belmora", "Castrel", "Dunholm", "Elvas", "Fornby", "Galvia", "Hestad", "Ivrea", "Jarnwick"]
CUISINES = ["Thai", "Greek", "Mexican", "Indian", "Italian"]
ROOMS = ["private room", "shared room", "entire flat"]
MODES = {"flight": (60, 180), "train": (25, 90), "bus": (10, 40)}
HOTEL_WORDS = ["Anchor", "Birch", "Crown", "Delta", "Ember", "Fern"]
MEAL_WORDS = [
    "Kettle",
    "Saffron",
    "Olive",
    "Lantern",
    "Harbour",
    "Pepper",
    "Orchard",
    "Copper",
    "Willow",
    "Quay",
    "Mint",
]
SIGHT_WORDS = ["Museum", "Castle", "Gardens", "Lighthouse", "Old Town", "Gallery"]


def slots_of(row: Row) -> set[tuple[int, str]]:
    """Every (day, field) of a plan."""
    return {(day, field) for day in range(1, len(row["route"]) + 1) for role in ROLES for field in role}


def options_of(row: Row, day: int, field: str) -> dict[str, Mapping[str, Any] | None]:
    """What may stand in a slot: value -> its list entry, or None for values such as a city's name or ``-``."""
    last, city = day == len(row["route"]), row["route"][day - 1]
    if field == "current_city":
        return {row["origin"] if last else city: None}
    if field == "transportation":
        leg = next((f"{start} to {end}" for on, start, end in row["legs"] if on == day), None)
        return {e["name"]: e for e in row["journeys"] if e["leg"] == leg} if leg else {"-": None}
    if field == "accommodation" and last:
        return {"-": None}
    name = {"accommodation": "hotels", "attraction": "attractions"}.get(field, "restaurants")
    return {entry["name"]: entry for entry in row[name] if entry["city"] == city}


def check_row(row: Row, where: str) -> None:
    """Raises ValueError for a row of a file that has no such plan."""
    for name in LISTS:
        for entry in row[name]:
            if not isinstance(entry, dict):
                raise ValueError(f"{where}: an entry of {name} must be a mapping, not {entry!r}")
            lacking = [key for key in ["name", *FIELDS_OF[name].split()] if not entry.get(key)]
            if lacking:
                raise ValueError(f"{where}: an entry of {name} lacks {', '.join(lacking)}")
            price = entry.get("price", 0)
            if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
                raise ValueError(f"{where}: price {price!r} of {entry['name']!r} must be a number, not negative")
    for day, field in sorted(slots_of(row)):
        if not options_of(row, day, field):
            raise ValueError(f"{where}: nothing in the lists fits {field} of day {day}")
    if len(row["caps"]) != 2 or row["people"] < 1:
        raise ValueError(f"{where}: caps must be two numbers and people at least 1")


def generated_rows(count: int, seed: int) -> list[Row]:
    generator = random.Random(seed)
    rows: list[Row] = []
    seen = set()
    while len(rows) < count:
        row = _row(generator)
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            rows.append(row)
    return rows


def _row(generator: random.Random) -> Row:
    days, people = generator.choice([3, 5]), generator.randint(1, 4)
    origin, first, second = generator.sample(CITIES, 3)
    route = [first] * 3 if days == 3 else [first, first, second, second, second]
    legs = [[1, origin, first]] + ([[3, first, second]] if days == 5 else []) + [[days, route[-1], origin]]
    row: Row = {"origin": origin, "route": route, "legs": legs, "people": people, "wishes": _wishes(generator)}
    row["journeys"] = [
        {"name": f"{mode.title()} {number}{mode[0].upper()}", "leg": f"{start} to {end}", "mode": mode, "price": price}
        for number, (_, start, end) in enumerate(legs, start=1)
        for mode, span in MODES.items()
        for price in [generator.randint(*span)]
    ]
    row["hotels"], row["restaurants"], row["attractions"] = [], [], []
    for city in dict.fromkeys(route):
        for room, word in zip(ROOMS, generator.sample(HOTEL_WORDS, 3)):
            entry = {"name": f"{word} House {city}", "city": city, "room": room, "price": generator.randint(30, 160)}
            row["hotels"].append(entry)
        for i, word in enumerate(generator.sample(MEAL_WORDS, 10)):
            meal = {
                "name": f"{word} {city}",
                "city": city,
                "cuisine": CUISINES[i % 5],
                "price": generator.randint(6, 40),
            }
            row["restaurants"].append(meal)
        for word in generator.sample(SIGHT_WORDS, 4):
            row["attractions"].append({"name": f"{city} {word}", "city": city, "price": generator.randint(0, 15)})
    row["caps"] = _caps(row)
    row["prompt"] = _request(row)
    return row


def _wishes(generator: random.Random) -> dict[str, str]:
    every = {
        "room": generator.choice(ROOMS),
        "avoid": generator.choice(sorted(MODES)),
        "cuisine": generator.choice(CUISINES),
    }
    return {name: every[name] for name in sorted(generator.sample(sorted(every), generator.randint(1, 3)))}


def _caps(row: Row) -> list[int]:
    """A fifth more than the cheapest fitting choice costs, for each role."""
    wishes, people, rooms = row["wishes"], row["people"], math.ceil(row["people"] / 2)
    journeys = [
        min(e["price"] for e in row["journeys"] if e["leg"] == f"{start} to {end}" and e["mode"] != wishes.get("avoid"))
        for _, start, end in row["legs"]
    ]
    nights = [
        min(e["price"] for e in row["hotels"] if e["city"] == city and e["room"] == wishes.get("room", e["room"]))
        for city in row["route"][:-1]
    ]
    meals = 0
    for city in dict.fromkeys(row["route"]):
        days = row["route"].count(city)
        prices = sorted(entry["price"] for entry in row["restaurants"] if entry["city"] == city)
        sights = sorted(entry["price"] for entry in row["attractions"] if entry["city"] == city)
        meals += sum(prices[: 3 * days]) + sum(sights[:days])
    if "cuisine" in wishes:  # in place of the cheapest meal
        meals += max(entry["price"] for entry in row["restaurants"]) - min(e["price"] for e in row["restaurants"])
    return [math.ceil(1.2 * (sum(journeys) * people + sum(nights) * rooms)), math.ceil(1.2 * meals * people)]


def _request(row: Row) -> str:
    wishes = {
        "room": "they want the room type '{}'",
        "avoid": "they do not travel by {}",
        "cuisine": "they want to eat {} at least once",
    }
    cities = " and ".join(dict.fromkeys(row["route"]))
    texts = "; ".join(wishes[name].format(value) for name, value in row["wishes"].items())
    count = f"{row['people']} {'person' if row['people'] == 1 else 'people'}"
    return (
        f"Plan {len(row['route'])} days for {count} from {row['origin']} to {cities} and back, "
        f"for at most {sum(row['caps'])} in all; {texts}."
    )
