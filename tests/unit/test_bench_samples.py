from bench.cpu import Patience
from bench.samples import Measure, Timing, in_rounds


async def test_every_round_begins_with_another_subject() -> None:
    asked: list[str] = []

    def subject(name: str) -> Measure:
        async def measure() -> Timing:
            asked.append(name)
            return Timing(tokens=1, duration_us=len(asked))

        return measure

    subjects = {name: subject(name) for name in "abc"}
    series = await in_rounds(subjects, 4, 0, Patience(0), lambda line: None)
    assert "".join(asked) == "abcbcacababc"
    assert [sample.timing.duration_us for sample in series["a"].kept] == [1, 6, 8, 10]
