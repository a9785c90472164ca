"""Prompts of the benchmark: questions, prose to go on with, and repetitive texts.

Each set has prompts to measure, and others from which the cost model learns.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Prompts of one kind.

    Attributes:
      is_chat: whether they are a user's turns, else texts to go on with.
      measured: prompts to measure.
      calibration: prompts to learn acceptance from.
    """

    is_chat: bool
    measured: tuple[str, ...]
    calibration: tuple[str, ...]


_CHAT = PromptSet(
    is_chat=True,
    measured=(
        "Explain why the sky is blue to somebody who has never studied physics.",
        "Give me advice for my first week in a new job.",
        "What should I pack for three days of walking in the mountains?",
        "Write a short story about a lighthouse keeper and a lost dog.",
        "What are the differences between a lake and a sea?",
    ),
    calibration=(
        "How do I look after a houseplant that has yellow leaves?",
        "Tell me how bread is made, step by step.",
        "Why do people like to travel by train?",
        "Suggest a name for a small cafe and say why it fits.",
        "What is the best way to learn a new language?",
        "Describe a rainy afternoon in a big city.",
    ),
)

_PROSE = PromptSet(
    is_chat=False,
    measured=(
        "The harbour was quiet that morning. A thin fog lay over the boats, and the "
        "old man who mended the nets had not yet come down from his house. When he "
        "did, he carried",
        "Rivers shape the land in two ways. They carry soil and stone from the hills "
        "to the plain, and they cut into the ground on which they run. Over a long "
        "time",
        "My grandmother kept a notebook in the kitchen drawer. In it she wrote down "
        "the weather, the price of eggs, and now and then a sentence about one of us. "
        "The first page said",
        "The town had one station, one school and two bakeries that did not speak to "
        "each other. Everybody bought bread in both, so as not to take sides. One "
        "winter",
        "A good map leaves things out. It shows the roads and not the trees, or the "
        "trees and not the roads, and whoever reads it has to know what it was made "
        "for. In the same way,",
    ),
    calibration=(
        "The garden behind the library was open to all, but few knew the door. Those "
        "who did came at noon with a book and an apple, and sat under",
        "Salt was once so dear that soldiers were paid in it. It kept meat through the "
        "winter and fish through the summer, and the towns that made it",
        "On the third day the wind turned. The sails filled, the cook began to sing, "
        "and the captain, who had said nothing since the island, asked for",
        "Bees do not sleep in winter. They gather around the queen and keep warm by "
        "moving their wings, and when the first flowers open",
        "The letter came on a Tuesday. It had no stamp and no name on it, only a small "
        "drawing of a bird in the corner. Inside",
        "Before there were clocks in every house, the day was cut by bells. One rang "
        "for the bakers, one for the schools, and the last one",
    ),
)

_REPETITIVE = PromptSet(
    is_chat=False,
    measured=(
        "| city | country | river |\n|---|---|---|\n| Paris | France | Seine |\n"
        "| London | England | Thames |\n| Vienna | Austria | Danube |\n"
        "| Rome | Italy | Tiber |\n| Lisbon | Portugal |",
        "def test_adds_zero():\n    assert add(0, 0) == 0\n\n\n"
        "def test_adds_one():\n    assert add(1, 1) == 2\n\n\n"
        "def test_adds_two():\n    assert add(2, 2) == 4\n\n\n"
        "def test_adds_three():\n",
        '[\n  {"id": 1, "name": "Anna", "active": true},\n'
        '  {"id": 2, "name": "Bert", "active": true},\n'
        '  {"id": 3, "name": "Carl", "active": false},\n'
        '  {"id": 4, "name":',
        "One green bottle hangs on the wall. Two green bottles hang on the wall. Three "
        "green bottles hang on the wall. Four green bottles hang on the wall. Five",
        "x = 1\nprint('x is', x)\nx = x + 1\nprint('x is', x)\nx = x + 1\n"
        "print('x is', x)\nx = x + 1\n",
    ),
    calibration=(
        "- Monday: open from 9 to 17\n- Tuesday: open from 9 to 17\n"
        "- Wednesday: open from 9 to 17\n- Thursday:",
        "def get_name(self):\n    return self.name\n\n\n"
        "def get_age(self):\n    return self.age\n\n\n"
        "def get_city(self):\n",
        "1 + 1 = 2\n2 + 2 = 4\n3 + 3 = 6\n4 + 4 = 8\n5 + 5 =",
        "name,age,city\nAnna,31,Bonn\nBert,28,Bern\nCarl,44,Graz\nDora,",
        "<ul>\n  <li><a href='/one'>One</a></li>\n  <li><a href='/two'>Two</a></li>\n"
        "  <li><a href='/three'>Three</a></li>\n",
        "The cat sat on the mat. The dog sat on the log. The cow sat on the",
    ),
)

PROMPT_SETS = {"chat": _CHAT, "prose": _PROSE, "repetitive": _REPETITIVE}
