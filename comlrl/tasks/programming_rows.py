"""Hand-written programming problems: each can be divided into a helper and a main function that uses its value."""

# ruff: noqa: E501  (programs in strings)

from __future__ import annotations

from comlrl.tasks import Row

# signature and text, reference helper, reference main, asserts
PROBLEMS = [
    (
        'def sum_of_primes(n: int) -> int:\n    """The sum of all primes that are at most n."""',
        "def aux(n):\n    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))",
        "def sum_of_primes(n):\n    return sum(k for k in range(n + 1) if aux(k))",
        ["candidate(10) == 17", "candidate(1) == 0", "candidate(2) == 2", "candidate(30) == 129"],
    ),
    (
        'def count_palindromes(words: list[str]) -> int:\n    """How many words read the same backwards, ignoring case."""',
        "def aux(word):\n    return word.lower() == word.lower()[::-1]",
        "def count_palindromes(words):\n    return sum(1 for word in words if aux(word))",
        ["candidate(['Anna', 'tree']) == 1", "candidate([]) == 0", "candidate(['a', 'abba', 'Otto', 'ab']) == 3"],
    ),
    (
        'def digit_range(numbers: list[int]) -> int:\n    """The largest digit sum of the numbers minus the smallest; '
        '0 for an empty list. Signs don\'t count."""',
        "def aux(n):\n    return sum(int(c) for c in str(abs(n)))",
        "def digit_range(numbers):\n    sums = [aux(n) for n in numbers]\n    return max(sums) - min(sums) if sums else 0",
        ["candidate([12, 99, 5]) == 15", "candidate([]) == 0", "candidate([-19, 10]) == 9", "candidate([7]) == 0"],
    ),
    (
        'def caesar_words(text: str, shift: int) -> str:\n    """Shift each lower-case letter by `shift` in the alphabet, '
        'round the end, then reverse the order of the words."""',
        "def aux(text, shift):\n    return ''.join(chr((ord(c) - 97 + shift) % 26 + 97) if 'a' <= c <= 'z' else c "
        "for c in text)",
        "def caesar_words(text, shift):\n    return ' '.join(reversed(aux(text, shift).split(' ')))",
        ["candidate('abc xyz', 1) == 'yza bcd'", "candidate('Hi', 2) == 'Hk'", "candidate('a b c', 0) == 'c b a'"],
    ),
    (
        'def most_vowels(words: list[str]) -> str:\n    """The first word with the most vowels (a, e, i, o, u); an empty '
        'text for an empty list."""',
        "def aux(word):\n    return sum(c in 'aeiouAEIOU' for c in word)",
        "def most_vowels(words):\n    return max(words, key=lambda word: aux(word)) if words else ''",
        ["candidate(['sky', 'idea', 'area']) == 'idea'", "candidate([]) == ''", "candidate(['b', 'Io']) == 'Io'"],
    ),
    (
        'def merge_scores(first: dict, second: dict) -> list:\n    """Add both dictionaries\' scores by name; the '
        '(name, score) pairs by falling score, equal ones by name."""',
        "def aux(first, second):\n    return {k: first.get(k, 0) + second.get(k, 0) for k in {*first, *second}}",
        "def merge_scores(first, second):\n    return sorted(aux(first, second).items(), key=lambda p: (-p[1], p[0]))",
        [
            "candidate({'a': 1}, {'b': 3}) == [('b', 3), ('a', 1)]",
            "candidate({'b': 1, 'a': 1}, {}) == [('a', 1), ('b', 1)]",
            "candidate({'x': 2}, {'x': 3}) == [('x', 5)]",
        ],
    ),
    (
        'def longest_run(values: list) -> int:\n    """The length of the longest run of equal neighbours."""',
        "def aux(values):\n    runs = []\n    for i, value in enumerate(values):\n        if i and value == values[i - 1]:\n"
        "            runs[-1] += 1\n        else:\n            runs.append(1)\n    return runs",
        "def longest_run(values):\n    return max(aux(values), default=0)",
        [
            "candidate([1, 1, 2, 2, 2, 3]) == 3",
            "candidate([]) == 0",
            "candidate(list('aab')) == 2",
            "candidate([5]) == 1",
        ],
    ),
    (
        'def is_balanced(text: str) -> bool:\n    """Whether the brackets ()[]{} of the text match; other characters '
        'do not count."""',
        "def aux(text):\n    return [c for c in text if c in '()[]{}']",
        "def is_balanced(text):\n    stack = []\n    for c in aux(text):\n        if c in '([{':\n            stack.append(c)\n"
        "        elif not stack or stack.pop() + c not in ('()', '[]', '{}'):\n            return False\n    return not stack",
        [
            "candidate('(a[b]{c})') is True",
            "candidate('([)]') is False",
            "candidate('((') is False",
            "candidate('') is True",
        ],
    ),
    (
        'def transpose_sums(rows: list[list[int]]) -> list[int]:\n    """The sum of each column; short rows count as '
        'filled with zeros."""',
        "def aux(rows):\n    width = max(map(len, rows), default=0)\n    return [row + [0] * (width - len(row)) for row in rows]",
        "def transpose_sums(rows):\n    return [sum(column) for column in zip(*aux(rows))]",
        ["candidate([[1, 2], [3]]) == [4, 2]", "candidate([]) == []", "candidate([[1], [2, 3, 4]]) == [3, 3, 4]"],
    ),
    (
        'def roman_total(numerals: list[str]) -> int:\n    """The sum of numbers written in Roman numerals."""',
        "def aux(text):\n    values = [dict(I=1, V=5, X=10, L=50, C=100, D=500, M=1000)[c] for c in text]\n    return sum(\n"
        "        -value if value < max(values[i:]) else value for i, value in enumerate(values)\n    )",
        "def roman_total(numerals):\n    return sum(aux(text) for text in numerals)",
        [
            "candidate(['IV', 'X']) == 14",
            "candidate([]) == 0",
            "candidate(['MCMXC']) == 1990",
            "candidate(['III']) == 3",
        ],
    ),
    (
        'def nearest_pair(points: list[tuple]) -> float:\n    """The smallest distance between two of the points (x, y), '
        'rounded to 3 digits; there are at least two."""',
        "import math\n\ndef aux(a, b):\n    return math.hypot(a[0] - b[0], a[1] - b[1])",
        "from itertools import combinations\n\ndef nearest_pair(points):\n"
        "    return round(min(aux(a, b) for a, b in combinations(points, 2)), 3)",
        [
            "candidate([(0, 0), (3, 4)]) == 5.0",
            "candidate([(0, 0), (1, 1), (9, 9)]) == 1.414",
            "candidate([(1, 1)] * 2) == 0",
        ],
    ),
    (
        'def pack(text: str) -> str:\n    """Write each run of equal characters as the character and the run\'s length, '
        'without a length of 1."""',
        "from itertools import groupby\n\ndef aux(text):\n    return [(c, len(list(group))) for c, group in groupby(text)]",
        "def pack(text):\n    return ''.join(c + (str(n) if n > 1 else '') for c, n in aux(text))",
        [
            "candidate('aaabcc') == 'a3bc2'",
            "candidate('') == ''",
            "candidate('xyz') == 'xyz'",
            "candidate('zz') == 'z2'",
        ],
    ),
]


def written_rows() -> list[Row]:
    rows = []
    for number, (prompt, helper, main, asserts) in enumerate(PROBLEMS):
        name = prompt.partition("def ")[2].partition("(")[0]
        checks = "\n".join(f"    assert {text}" for text in asserts)
        rows.append(
            {
                "task_id": f"written/{number}",
                "prompt": prompt + "\n",
                "entry_point": name,
                "test": f"def check(candidate):\n{checks}\n",
                "helper_solution": helper,
                "main_solution": main,
            }
        )
    return rows
