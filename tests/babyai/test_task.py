"""The task: deterministic, disjoint splits, the package's own reward, and words that say what is there."""

from itertools import islice

import pytest

pytest.importorskip("minigrid", reason="needs the babyai extra: pip install -e .[babyai]")

from minigrid.utils.baby_ai_bot import BabyAIBot

from experiments.babyai.task import MOST_STEPS, ROOMS, SPLITS, Room, inputs

SEEDS = [seed for task in islice(inputs(0), 20) for seed in task["seeds"]]


def test_a_stream_repeats_and_another_seed_is_another_stream() -> None:
    first, again, other = (list(islice(inputs(seed), 50)) for seed in (3, 3, 4))
    assert first == again
    seeds, others = ([seed for task in tasks for seed in task["seeds"]] for tasks in (first, other))
    assert len(set(seeds)) == 50 * ROOMS and not set(seeds) & set(others)


def test_splits_are_disjoint_by_construction() -> None:
    for index, split in enumerate(SPLITS):
        for seed in range(5):
            assert {room % len(SPLITS) for task in islice(inputs(seed, split), 50) for room in task["seeds"]} == {index}
    with pytest.raises(ValueError, match=r"'test'.*train, val, warm"):
        next(inputs(0, "test"))


def test_an_episode_repeats_word_for_word() -> None:
    def words(seed: int) -> list[str]:
        room = Room(seed)
        said = [room.mission, room.describe()]
        for _ in range(MOST_STEPS):
            room.act(sorted(room.commands())[0])
            said.append(room.describe())
            if room.done:
                break
        return said

    assert [words(seed) for seed in SEEDS[:10]] == [words(seed) for seed in SEEDS[:10]]
    assert len({tuple(words(seed)) for seed in SEEDS[:10]}) == 10


def test_the_bot_is_paid_what_the_package_pays() -> None:
    for seed in SEEDS:
        room, steps = Room(seed), 0
        bot = BabyAIBot(room.env)
        while not room.done:
            wish = bot.replan()
            room.act(next(text for text, action in room.commands().items() if action == wish))
            steps += 1
        assert room.reward == pytest.approx(1 - 0.9 * steps / MOST_STEPS) and steps < MOST_STEPS


def test_turning_for_ever_ends_without_a_reward() -> None:
    room = Room(1000001)
    for step in range(MOST_STEPS):
        assert not room.done, step
        room.act("turn left" if room.env.front_pos[0] % 2 else "turn right")
    assert room.done and room.reward == 0.0


def test_the_words_agree_with_the_grid() -> None:
    """Worked by hand: where a thing "2 left 1" lies, two cells ahead and one to the left of the agent, it is."""
    checked = 0
    for seed in SEEDS:
        room = Room(seed)
        env = room.env
        for part in room.describe().removeprefix("see ").split(", "):
            if part in ("wall", "nothing"):
                continue
            colour, kind, ahead, *side = part.split()
            across = int(side[1]) * (1 if side[0] == "right" else -1) if side else 0
            x, y = env.agent_pos + int(ahead) * env.dir_vec + across * env.right_vec
            thing = env.grid.get(x, y)
            assert (thing.color, thing.type) == (colour, kind)
            checked += 1
    assert checked > 60


def test_commands_are_those_that_change_the_room() -> None:
    for seed in SEEDS:
        room = Room(seed)
        env = room.env
        front = env.grid.get(*env.front_pos)
        assert ("go forward" in room.commands()) == (front is None)
        assert any(text.startswith("take") for text in room.commands()) == (front is not None and front.can_pickup())
        assert "turn left" in room.commands() and "turn right" in room.commands()
