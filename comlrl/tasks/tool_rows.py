"""Generated rows of the tool-use task, in the form of BFCL: a few functions, requests from templates, their calls."""

from __future__ import annotations

import random
from typing import Any

from comlrl.tasks import Row

CITIES = ["Oslo", "Lima", "Kyoto", "Cairo", "Quito", "Perth", "Turin", "Dakar", "Bergen", "Austin"]
PEOPLE = ["Mara", "Ivo", "Lena", "Tomas", "Nadia", "Jonas", "Priya", "Wen"]
CURRENCIES = ["EUR", "USD", "JPY", "GBP", "CHF", "NOK"]
CUISINES = ["Thai", "Greek", "Mexican", "Korean", "Italian"]


def _function(name: str, description: str, required: list[str], **properties: tuple[str, str]) -> dict[str, Any]:
    shape = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "dict", "properties": shape, "required": required},
    }


FUNCTIONS = {
    "weather.forecast": _function(
        "weather.forecast",
        "The forecast of a city.",
        ["city", "days"],
        city=("string", "Name of the city."),
        days=("integer", "Number of days."),
        unit=("string", "celsius (default) or fahrenheit."),
    ),
    "convert_currency": _function(
        "convert_currency",
        "Converts an amount of money.",
        ["amount", "source", "target"],
        amount=("float", "The amount."),
        source=("string", "Currency code of the amount."),
        target=("string", "Currency code wanted."),
    ),
    "set_timer": _function(
        "set_timer",
        "Starts a timer.",
        ["minutes"],
        minutes=("integer", "Length in minutes."),
        label=("string", "Name of the timer. Default: none."),
    ),
    "restaurant.book": _function(
        "restaurant.book",
        "Books a table.",
        ["city", "cuisine", "guests"],
        city=("string", "Name of the city."),
        cuisine=("string", "Kind of food."),
        guests=("integer", "Number of guests."),
        outdoors=("boolean", "Whether to sit outdoors. Default: false."),
    ),
    "message.send": _function(
        "message.send",
        "Sends one message to several people.",
        ["receivers", "text"],
        receivers=("array", "Names."),
        text=("string", "What to send."),
    ),
}
FUNCTIONS["message.send"]["parameters"]["properties"]["receivers"]["items"] = {"type": "string"}


def generated_rows(count: int, seed: int) -> list[Row]:
    """``count`` different requests of two to four calls each."""
    generator, seen = random.Random(seed), set[str]()
    rows: list[Row] = []
    while len(rows) < count:
        clauses = [_clause(generator) for _ in range(generator.randint(2, 4))]
        prompt = "Please " + ", then ".join(text for text, _ in clauses) + "."
        calls = [call for _, call in clauses]
        if prompt in seen or len({repr(call) for call in calls}) < len(calls):
            continue
        seen.add(prompt)
        used = {next(iter(call)) for call in calls}
        offered = [name for name in FUNCTIONS if name in used or generator.random() < 0.3]
        rows.append({"prompt": prompt, "functions": [FUNCTIONS[name] for name in offered], "ground_truth": calls})
    return rows


def _clause(generator: random.Random) -> tuple[str, dict[str, Any]]:
    """A piece of the request, and the call it asks for."""
    pick = generator.choice
    name = pick(sorted(FUNCTIONS))
    if name == "weather.forecast":
        city, days = pick(CITIES), generator.randint(2, 9)
        fahrenheit = generator.random() < 0.3
        text = f"get the {days}-day forecast for {city}" + (" in fahrenheit" if fahrenheit else "")
        unit = ["fahrenheit"] if fahrenheit else ["", "celsius"]
        return text, {name: {"city": [city], "days": [days], "unit": unit}}
    if name == "convert_currency":
        (source, target), amount = generator.sample(CURRENCIES, 2), generator.randint(2, 400) / 2
        text = f"convert {amount:g} {source} to {target}"
        return text, {name: {"amount": [amount], "source": [source], "target": [target]}}
    if name == "set_timer":
        minutes, label = generator.randint(1, 90), pick(["tea", "bread", "laundry", ""])
        text = f"start a timer of {minutes} minutes" + (f" called {label}" if label else "")
        return text, {name: {"minutes": [minutes], "label": [label]}}
    if name == "restaurant.book":
        city, cuisine, guests, outdoors = pick(CITIES), pick(CUISINES), generator.randint(2, 8), pick([True, False])
        text = f"book a {cuisine} restaurant in {city} for {guests} guests" + (" outdoors" if outdoors else "")
        accepted = {"city": [city], "cuisine": [cuisine], "guests": [guests]}
        return text, {name: accepted | {"outdoors": [True] if outdoors else ["", False]}}
    people, words = (
        generator.sample(PEOPLE, 2),
        pick(["running late", "see you soon", "happy birthday", "call me back"]),
    )
    text = f"send the message '{words}' to {people[0]} and {people[1]}"
    return text, {name: {"receivers": [people, people[::-1]], "text": [words]}}
