"""Prompts for measuring speculation on code: to write a function, and to change a given one and repeat the rest."""

from __future__ import annotations

WRITE = (
    "Write a Python function that parses a CSV line with quoted fields, without the csv module.",
    "Write a Python class for a least-recently-used cache with get, put and a capacity.",
    "Write a Python function that returns the shortest path in a weighted graph with Dijkstra's algorithm.",
    "Write a C function that reverses a singly linked list in place, and explain it in one sentence.",
    "Write a Python function that merges overlapping intervals, with type hints and a docstring.",
    "Write a SQL query that lists the three customers with the largest total of orders in each country.",
    "Write a Python decorator that retries a function with exponential back-off and a limit of attempts.",
    "Write a JavaScript function that debounces another function, with an option to call at the leading edge.",
)

_INVENTORY = '''
class Inventory:
    """Items in a warehouse, by name."""

    def __init__(self):
        self.items = {}
        self.log = []

    def add(self, name, count, price):
        if count <= 0:
            raise ValueError("count must be positive")
        if name in self.items:
            self.items[name]["count"] += count
            self.items[name]["price"] = price
        else:
            self.items[name] = {"count": count, "price": price}
        self.log.append(("add", name, count))

    def remove(self, name, count):
        if name not in self.items:
            raise KeyError(name)
        if self.items[name]["count"] < count:
            raise ValueError("not enough items")
        self.items[name]["count"] -= count
        if self.items[name]["count"] == 0:
            del self.items[name]
        self.log.append(("remove", name, count))

    def total(self):
        return sum(item["count"] * item["price"] for item in self.items.values())
'''

_MATRIX = """
def multiply(a, b):
    rows, inner, columns = len(a), len(b), len(b[0])
    result = [[0.0] * columns for _ in range(rows)]
    for i in range(rows):
        for j in range(columns):
            total = 0.0
            for k in range(inner):
                total += a[i][k] * b[k][j]
            result[i][j] = total
    return result


def transpose(a):
    return [[a[i][j] for i in range(len(a))] for j in range(len(a[0]))]


def identity(size):
    return [[1.0 if i == j else 0.0 for j in range(size)] for i in range(size)]


def power(a, exponent):
    result = identity(len(a))
    while exponent > 0:
        if exponent % 2 == 1:
            result = multiply(result, a)
        a = multiply(a, a)
        exponent //= 2
    return result
"""

_LOG = """
import re
from collections import Counter

LINE = re.compile(r"(\\S+) - - \\[(.*?)\\] \\"(\\S+) (\\S+) (\\S+)\\" (\\d+) (\\d+|-)")


def parse(line):
    match = LINE.match(line)
    if match is None:
        return None
    host, time, method, path, protocol, status, size = match.groups()
    return {
        "host": host,
        "time": time,
        "method": method,
        "path": path,
        "protocol": protocol,
        "status": int(status),
        "size": 0 if size == "-" else int(size),
    }


def summarise(lines):
    hosts, statuses, total = Counter(), Counter(), 0
    for line in lines:
        entry = parse(line)
        if entry is None:
            continue
        hosts[entry["host"]] += 1
        statuses[entry["status"]] += 1
        total += entry["size"]
    return hosts.most_common(10), dict(statuses), total
"""

_CHANGES = (
    ("Rename the class to Stock and the method total to value.", _INVENTORY),
    ("Add a method count(name) that returns how many there are, 0 if there is none.", _INVENTORY),
    ("Add type hints to all functions.", _MATRIX),
    ("Raise a ValueError in multiply if the sizes do not fit.", _MATRIX),
    ("Count the methods as well and return them as a fourth value of summarise.", _LOG),
    ("Add a one-line docstring to each function.", _LOG),
)
EDIT = tuple(
    f"{change} Answer with the whole changed file and nothing else.\n\n```python\n{code.strip()}\n```"
    for change, code in _CHANGES
)
