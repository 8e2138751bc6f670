"""Hand-written classes to complete, in the form of ClassEval: skeleton, unittest classes, solution."""

# ruff: noqa: E501  (programs in strings)

from __future__ import annotations

import textwrap

from comlrl.tasks import Row

# name, given part (with __init__), methods as (signature, text, body), tests as (name, body)
CLASSES = [
    (
        "Account",
        "def __init__(self, owner, balance=0):\n    self.owner = owner\n    self.balance = balance\n    self.history = []",
        [
            ("deposit(self, amount)", "Add amount; ValueError unless it is positive. Returns the balance, records ('in', amount).",
             "if amount <= 0:\n    raise ValueError('amount')\nself.balance += amount\nself.history.append(('in', amount))\nreturn self.balance"),
            ("withdraw(self, amount)", "Take amount if there is enough, record ('out', amount). Returns whether it worked.",
             "if amount > self.balance:\n    return False\nself.balance -= amount\nself.history.append(('out', amount))\nreturn True"),
            ("interest(self, rate)", "Deposit balance * rate, if that is positive. Returns the balance.",
             "gain = self.balance * rate\nreturn self.deposit(gain) if gain > 0 else self.balance"),
            ("summary(self)", "The text 'owner: balance (n moves)'.",
             "return f'{self.owner}: {self.balance} ({len(self.history)} moves)'"),
        ],
        [
            ("deposit", "a = Account('Mia', 5)\nself.assertEqual(a.deposit(3), 8)\nself.assertEqual(a.history, [('in', 3)])"),
            ("deposit_refuses", "with self.assertRaises(ValueError):\n    Account('Mia').deposit(0)"),
            ("withdraw", "a = Account('Mia', 5)\nself.assertTrue(a.withdraw(2))\nself.assertEqual(a.balance, 3)\nself.assertFalse(a.withdraw(9))"),
            ("interest", "a = Account('Mia', 100)\nself.assertEqual(a.interest(0.5), 150)\nself.assertEqual(Account('Bo').interest(0.5), 0)"),
            ("summary", "a = Account('Mia', 5)\na.deposit(1)\nself.assertEqual(a.summary(), 'Mia: 6 (1 moves)')"),
        ],
    ),
    (
        "Stack",
        "def __init__(self, limit=3):\n    self.limit = limit\n    self.items = []",
        [
            ("push(self, item)", "Put item on top; OverflowError if the stack has limit items. Returns the size.",
             "if len(self.items) >= self.limit:\n    raise OverflowError('full')\nself.items.append(item)\nreturn len(self.items)"),
            ("pop(self)", "Take the top item and return it; None if there is none.", "return self.items.pop() if self.items else None"),
            ("peek(self, depth=0)", "The item depth places below the top, which stays; None if there is none.",
             "return self.items[-1 - depth] if depth < len(self.items) else None"),
            ("drain(self)", "Pop all items; returns them, the top one first.", "taken = []\nwhile self.items:\n    taken.append(self.pop())\nreturn taken"),
        ],
        [
            ("push", "s = Stack()\nself.assertEqual([s.push(1), s.push(2)], [1, 2])"),
            ("full", "s = Stack(1)\ns.push(1)\nwith self.assertRaises(OverflowError):\n    s.push(2)"),
            ("pop", "s = Stack()\ns.push('a')\nself.assertEqual(s.pop(), 'a')\nself.assertIsNone(s.pop())"),
            ("peek", "s = Stack()\ns.push(1)\ns.push(2)\nself.assertEqual([s.peek(), s.peek(1)], [2, 1])\nself.assertIsNone(s.peek(2))"),
            ("drain", "s = Stack()\ns.push(1)\ns.push(2)\nself.assertEqual(s.drain(), [2, 1])\nself.assertEqual(s.items, [])"),
        ],
    ),
    (
        "TextStats",
        "def __init__(self, text):\n    self.text = text",
        [
            ("words(self)", "The words in lower case, without the marks .,;:!? at their ends.",
             "return [word.strip('.,;:!?').lower() for word in self.text.split()]"),
            ("counts(self)", "A dictionary of each word's number.", "return {word: self.words().count(word) for word in self.words()}"),
            ("longest(self)", "The first of the longest words; an empty text if there is none.", "return max(self.words(), key=len, default='')"),
            ("share(word_count, total)", "word_count / total, rounded to 2 digits; 0.0 if total is 0. (static)",
             "return round(word_count / total, 2) if total else 0.0"),
        ],
        [
            ("words", "self.assertEqual(TextStats('Hi, you! Hi').words(), ['hi', 'you', 'hi'])"),
            ("counts", "self.assertEqual(TextStats('a b. A').counts(), {'a': 2, 'b': 1})"),
            ("longest", "self.assertEqual(TextStats('ab abc abd').longest(), 'abc')\nself.assertEqual(TextStats('').longest(), '')"),
            ("share", "self.assertEqual(TextStats.share(1, 3), 0.33)\nself.assertEqual(TextStats.share(1, 0), 0.0)"),
        ],
    ),
    (
        "Grid",
        "def __init__(self, width, height):\n    self.width = width\n    self.height = height\n    self.marked = set()",
        [
            ("inside(self, x, y)", "Whether 0 <= x < width and 0 <= y < height.", "return 0 <= x < self.width and 0 <= y < self.height"),
            ("mark(self, x, y)", "Mark a cell. Returns whether it is inside and was not marked before.",
             "if not self.inside(x, y) or (x, y) in self.marked:\n    return False\nself.marked.add((x, y))\nreturn True"),
            ("neighbours(self, x, y)", "The cells left, right, above and below that are inside, as a sorted list of (x, y).",
             "cells = [(x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)]\nreturn sorted(cell for cell in cells if self.inside(*cell))"),
            ("free(self)", "How many cells are not marked.", "return self.width * self.height - len(self.marked)"),
        ],
        [
            ("inside", "g = Grid(2, 3)\nself.assertTrue(g.inside(1, 2))\nself.assertFalse(g.inside(2, 0))"),
            ("mark", "g = Grid(2, 2)\nself.assertEqual([g.mark(0, 0), g.mark(0, 0), g.mark(5, 5)], [True, False, False])\nself.assertEqual(g.marked, {(0, 0)})"),
            ("neighbours", "self.assertEqual(Grid(2, 2).neighbours(0, 0), [(0, 1), (1, 0)])"),
            ("free", "g = Grid(2, 2)\ng.mark(1, 1)\nself.assertEqual(g.free(), 3)"),
        ],
    ),
]  # fmt: skip


def written_rows() -> list[Row]:
    return [build_row(*entry) for entry in CLASSES]


def build_row(name: str, given: str, methods: list[tuple], tests: list[tuple]) -> Row:
    skeleton, solution = [_indented(given)], [_indented(given)]
    for signature, text, body in methods:
        head = ("" if "(self" in signature else "@staticmethod\n") + f'def {signature}:\n    """{text}"""'
        skeleton.append(_indented(head))
        solution.append(_indented(f"{head}\n{_indented(body)}"))
    cases = [_indented(f"def test_{test}(self):\n{_indented(body)}") for test, body in tests]
    return {
        "task_id": f"written/{name}",
        "class_name": name,
        "prompt": f"Complete the class {name}.",
        "skeleton": f"class {name}:\n" + "\n\n".join(skeleton) + "\n",
        "solution_code": f"class {name}:\n" + "\n\n".join(solution) + "\n",
        "test": f"import unittest\n\n\nclass {name}Test(unittest.TestCase):\n" + "\n\n".join(cases) + "\n",
    }


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")
