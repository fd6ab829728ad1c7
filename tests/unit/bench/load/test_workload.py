"""Work: exact prompts, shared prefixes, traces, files and sessions; the same for the same seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.small_tokenizers import KINDS, make
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.texts import count_tokens, load_tokenizer
from trtpipe.pipeline.bench.load.work import Sessions, SharedPrefix, Work
from trtpipe.pipeline.bench.load.workload import RequestSpec, Workload, unrendered


@pytest.fixture(scope="module", params=KINDS)
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make(request.param, tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of one special token, in front."""
    return load_tokenizer(make("byte-level", tmp_path_factory.mktemp("tokenizer")))


def first(count: int, work: Work, tokenizer: Tokenizer, seed: int = 0) -> list[RequestSpec]:
    return list(islice(Workload(work, tokenizer, seed).asks(), count))


def shared_tokens(tokenizer: Tokenizer, a: str, b: str) -> int:
    """Tokens that two prompts begin with alike."""
    left, right = tokenizer.encode(a).ids, tokenizer.encode(b).ids
    same = (index for index, (x, y) in enumerate(zip(left, right, strict=False)) if x != y)
    return next(same, min(len(left), len(right)))


def exact(tokenizer: Tokenizer, asks: list[RequestSpec]) -> bool:
    return all(len(tokenizer.encode(ask.prompt).ids) == ask.input_tokens for ask in asks)


# Made prompts


@settings(max_examples=15)
@given(
    lengths=st.sampled_from([20, "normal:40,30", "lognormal:30,1", "uniform:12,90", "mix:0.5*15+0.5*normal:90,9"]),
    seed=st.integers(0, 2**32),
    prefix=st.none() | st.builds(SharedPrefix, share=st.just(0.5), tokens=st.just(9), groups=st.integers(1, 3)),
)
def test_every_made_prompt_has_exactly_the_tokens_it_says(
    any_tokenizer: Tokenizer, lengths: int | str, seed: int, prefix: SharedPrefix | None
) -> None:
    asks = first(60, Work(input_tokens=lengths, output_tokens="uniform:1,9", shared_prefix=prefix), any_tokenizer, seed)
    assert exact(any_tokenizer, asks)
    assert len({ask.prompt for ask in asks}) == 60
    assert [ask.session for ask in asks] == list(range(60))
    assert {(ask.turn, ask.think_s) for ask in asks} == {(0, 0.0)}
    assert {ask.output_tokens for ask in asks} <= set(range(1, 10))


def test_by_default_64_tokens_are_answered_with_64(tokenizer: Tokenizer) -> None:
    (ask,) = first(1, Work(), tokenizer)
    assert (ask.input_tokens, ask.output_tokens) == (64, 64)
    assert ask.options == {"ignore_eos": True, "min_tokens": 64}


def test_options_of_the_work_go_with_every_request(tokenizer: Tokenizer) -> None:
    (ask,) = first(1, Work(options={"temperature": 0.7, "min_tokens": 3}), tokenizer)
    assert ask.options == {"ignore_eos": True, "min_tokens": 3, "temperature": 0.7}
    (free,) = first(1, Work(ignore_eos=False, options={"top_k": 1}), tokenizer)
    assert free.options == {"top_k": 1}


def test_lengths_follow_their_distributions(tokenizer: Tokenizer) -> None:
    asks = first(2000, Work(input_tokens="normal:60,10", output_tokens="mix:0.25*5+0.75*9"), tokenizer)
    assert sum(ask.input_tokens for ask in asks) / 2000 == pytest.approx(60, abs=1)
    assert sum(ask.output_tokens == 5 for ask in asks) / 2000 == pytest.approx(0.25, abs=0.03)


def test_a_seed_makes_the_work_and_every_load_point_sees_the_same_lengths_and_no_prompt_twice(
    tokenizer: Tokenizer,
) -> None:
    work = Work(input_tokens="uniform:20,60", output_tokens="uniform:1,99")
    workload = Workload(work, tokenizer, 3)
    one, two = (list(islice(workload.asks(), 700)) for _ in range(2))
    assert one == first(700, work, tokenizer, seed=3)
    assert one != first(700, work, tokenizer, seed=4)
    assert [(ask.input_tokens, ask.output_tokens) for ask in one] == [
        (ask.input_tokens, ask.output_tokens) for ask in two
    ]
    assert len({ask.prompt for ask in one + two}) == 1400
    # Not by their first words alone.
    assert len({ask.prompt.split(" ", 10)[-1] for ask in one + two}) == 1400
    assert workload.distinct is None


def test_what_the_answers_are_does_not_change_the_prompts(tokenizer: Tokenizer) -> None:
    short, long = (first(50, Work(output_tokens=tokens), tokenizer) for tokens in (1, "uniform:1,500"))
    assert [ask.prompt for ask in short] == [ask.prompt for ask in long]


def test_longer_ones_are_left_out(tokenizer: Tokenizer) -> None:
    asks = first(300, Work(input_tokens="uniform:10,90", output_tokens="uniform:1,40", max_total_tokens=70), tokenizer)
    totals = [ask.input_tokens + ask.output_tokens for ask in asks]
    assert max(totals) == 70
    with pytest.raises(UsageError, match="no request is within max_total_tokens 20: 10000 lengths in a row"):
        first(1, Work(input_tokens=15, output_tokens=6, max_total_tokens=20), tokenizer)


# Shared prefixes


def test_a_share_of_the_prompts_begins_with_one_of_the_groups(tokenizer: Tokenizer) -> None:
    prefix = SharedPrefix(share=0.5, tokens=20, groups=4)
    asks = first(1000, Work(input_tokens="uniform:30,60", shared_prefix=prefix), tokenizer)
    assert exact(tokenizer, asks)
    starts = Counter(tuple(tokenizer.encode(ask.prompt).ids[:20]) for ask in asks)
    common = {start: count for start, count in starts.items() if count > 1}
    assert len(common) == 4
    assert sum(common.values()) == pytest.approx(500, abs=60)
    assert min(common.values()) > 80
    # Exactly so many: what follows differs, in all but the few that happen to go on with the same word.
    for start in common:
        group = [ask.prompt for ask in asks if tuple(tokenizer.encode(ask.prompt).ids[:20]) == start]
        following = Counter(tokenizer.encode(prompt).ids[20] for prompt in group)
        assert max(following.values()) < len(group) / 3
        assert len(set(group)) == len(group)


def test_the_prefix_counts_the_special_token_and_is_another_at_the_next_load_point(tokenizer: Tokenizer) -> None:
    workload = Workload(Work(input_tokens=30, shared_prefix=SharedPrefix(share=1, tokens=20)), tokenizer, 0)
    one, two = (list(islice(workload.asks(), 40)) for _ in range(2))
    assert min(shared_tokens(tokenizer, one[0].prompt, ask.prompt) for ask in one) == 20
    assert max(shared_tokens(tokenizer, one[0].prompt, ask.prompt) for ask in two) < 5


def test_no_room_is_said_before_anything_is_made(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError) as caught:
        Workload(Work(input_tokens="uniform:20,90", shared_prefix=SharedPrefix(share=0.1, tokens=20)), tokenizer, 0)
    assert str(caught.value) == (
        "a prompt of 20 tokens has no room for a word of its own: "
        "the tokenizer adds 1 special tokens, and 20 are shared with others; give at least 21 input tokens"
    )
    with pytest.raises(UsageError, match="the tokenizer adds 1 special tokens; give at least 2 input tokens"):
        Workload(Work(input_tokens=1), tokenizer, 0)
    with pytest.raises(UsageError, match="a shared prefix of 1 tokens has no room for a word: the tokenizer adds 1 "):
        Workload(Work(shared_prefix=SharedPrefix(share=1, tokens=1)), tokenizer, 0)
    with pytest.raises(UsageError, match="seed is -1; give 0 or more"):
        Workload(Work(), tokenizer, -1)
    # The tail of a distribution is no mistake.
    for lengths, shortest in (("normal:5,5", 5), ("normal:30,30", 7), ("uniform:3,50", 3)):
        asks = first(300, Work(input_tokens=lengths), tokenizer)
        assert min(ask.input_tokens for ask in asks) == shortest
        assert exact(tokenizer, asks)


# Traces


def trace(tmp_path: Path, *requests: tuple[int, int, list[int]]) -> Path:
    path = tmp_path / "trace.jsonl"
    keys = ("input_length", "output_length", "hash_ids")
    lines = [json.dumps({"timestamp": 0, **dict(zip(keys, request, strict=True))}) for request in requests]
    path.write_text("\n".join(lines))
    return path


def test_requests_of_a_trace_share_the_blocks_that_have_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        (1500, 7, [1, 2, 3]),
        (1024, 8, [1, 2]),
        (1500, 9, [1, 9, 3]),
        (700, 1, [5, 6]),
        (1100, 2, []),
        (1024, 8, [1, 2]),
        (600, 3, [1]),
        (513, 4, [1]),
    )
    asks = first(8, Work(trace=path), tokenizer)
    assert [(ask.input_tokens, ask.output_tokens) for ask in asks] == [
        (1500, 7), (1024, 8), (1500, 9), (700, 1), (1100, 2), (1024, 8), (600, 3), (513, 4),
    ]  # fmt: skip
    assert exact(tokenizer, asks)
    prompts = [ask.prompt for ask in asks]

    def shared(a: int, b: int) -> int:
        return shared_tokens(tokenizer, prompts[a], prompts[b])

    # The special token, and blocks of 512 each. What is cut off a block at the end of a prompt is not shared.
    assert shared(0, 1) == 1024
    assert 513 <= shared(0, 2) <= 516
    assert 513 <= shared(0, 6) <= 516
    assert shared(0, 3) < 4
    assert shared(4, 0) < 4
    assert prompts[1] == prompts[5]
    assert prompts[0].startswith(prompts[7] + " ")
    # The same id is the same text after another block as well.
    assert prompts[0].split()[1024:] == prompts[2].split()[1024:]


def test_a_trace_begins_again_with_other_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    work = Work(trace=trace(tmp_path, (600, 7, [1, 2]), (600, 8, [1, 3])), max_total_tokens=608)
    workload = Workload(work, tokenizer, 0)
    one, two = (list(islice(workload.asks(), 4)) for _ in range(2))
    assert [ask.output_tokens for ask in one] == [7, 8, 7, 8]
    assert 513 <= shared_tokens(tokenizer, one[2].prompt, one[3].prompt) <= 516
    assert shared_tokens(tokenizer, one[0].prompt, one[2].prompt) < 5
    assert shared_tokens(tokenizer, one[0].prompt, two[0].prompt) < 5
    assert one == first(4, work, tokenizer)


@settings(max_examples=10)
@given(
    requests=st.lists(
        st.tuples(st.integers(6, 1600), st.integers(1, 9), st.lists(st.integers(0, 4), max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_prompts_of_a_trace_are_exact(
    any_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[int, int, list[int]]]
) -> None:
    asks = first(2 * len(requests), Work(trace=trace(tmp_path_factory.mktemp("trace"), *requests)), any_tokenizer)
    assert exact(any_tokenizer, asks)
    assert [ask.input_tokens for ask in asks] == [length for length, _, _ in requests] * 2


# Files


def prompt_file(tmp_path: Path, *entries: dict[str, Any]) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def test_prompts_of_a_file_come_in_its_order_and_begin_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = prompt_file(
        tmp_path,
        {"prompt": "ant bee", "max_tokens": 5, "temperature": 0.5, "min_tokens": 1},
        {"text_input": "<s>cow dog", "ignore_eos": False},
    )
    workload = Workload(Work(prompts=path, output_tokens=9, options={"temperature": 1, "top_k": 2}), tokenizer, 0)
    assert list(islice(workload.asks(), 3)) == [
        RequestSpec("ant bee", 3, 5, 0, options={"ignore_eos": True, "min_tokens": 1, "temperature": 0.5, "top_k": 2}),
        RequestSpec("<s>cow dog", 3, 9, 1, options={"ignore_eos": False, "temperature": 1, "top_k": 2}),
        RequestSpec("ant bee", 3, 5, 2, options={"ignore_eos": True, "min_tokens": 1, "temperature": 0.5, "top_k": 2}),
    ]
    assert workload.distinct == 2


def test_a_text_file_is_found_in_the_work_s_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("ant bee cow\ndog\n")
    asks = first(2, Work(prompts=Path("some.txt"), folder=tmp_path, output_tokens="uniform:3,4"), tokenizer)
    assert [(ask.prompt, ask.input_tokens) for ask in asks] == [("ant bee cow", 4), ("dog", 2)]
    assert {ask.output_tokens for ask in asks} <= {3, 4}


def test_messages_are_rendered_by_the_model_s_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    message = {"role": "user", "content": "ant bee"}
    path = prompt_file(tmp_path, {"messages": [message]}, {"prompt": "ant"})
    render: Callable[[list[dict[str, str]]], str] = lambda messages: "<s>" + messages[0]["content"] + " cow"  # noqa: E731
    asks = list(islice(Workload(Work(prompts=path), tokenizer, 0, render).asks(), 2))
    assert [(ask.prompt, ask.input_tokens, ask.messages) for ask in asks] == [
        ("<s>ant bee cow", 4, (message,)),
        ("ant", 2, None),
    ]
    with pytest.raises(UsageError, match=r"prompts\.jsonl has messages, and there is no chat template"):
        Workload(Work(prompts=path), tokenizer, 0)
    # A server that renders them itself tells how long they are.
    (ask,) = islice(Workload(Work(prompts=path), tokenizer, 0, unrendered).asks(), 1)
    assert (ask.prompt, ask.messages) == ("ant bee", (message,))


def test_the_answers_of_conversations_say_how_long_the_answers_are(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    texts = [("ant bee", "cow dog elk"), ("fox", "gnu"), ("hen " * 50, "ibis")]
    path.write_text(json.dumps([
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        for question, answer in texts
    ]))  # fmt: skip
    asks = first(4, Work(sharegpt=path, max_total_tokens=40), tokenizer)
    assert [(ask.prompt, ask.input_tokens) for ask in asks] == [("ant bee", 3), ("fox", 2), ("ant bee", 3), ("fox", 2)]
    assert [ask.output_tokens for ask in asks[:2]] == [count_tokens(tokenizer, answer) for _, answer in texts[:2]]
    with pytest.raises(
        UsageError, match="no request is within max_total_tokens 2: all 3 prompts of the file are longer"
    ):
        first(1, Work(sharegpt=path, max_total_tokens=2), tokenizer)


def test_a_file_may_be_shuffled(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    path.write_text("\n".join(f"ant {number}" for number in range(50)))

    def order(seed: int) -> list[str]:
        return [ask.prompt for ask in first(50, Work(prompts=path, shuffle=True), tokenizer, seed)]

    assert sorted(order(0)) == sorted(path.read_text().splitlines())
    assert order(0) == order(0) != order(1)
    assert order(0) != path.read_text().splitlines()


# Sessions


def test_every_turn_is_the_conversation_so_far_and_new_words(tokenizer: Tokenizer) -> None:
    sessions = Sessions(turns=3, think_s=1.5, user_tokens="uniform:4,9")
    asks = Workload(Work(input_tokens=20, output_tokens="uniform:1,50", sessions=sessions), tokenizer, 0).asks()
    turns = [next(asks)]
    answer = " newt, owl!"
    while (turn := asks.next_turn(turns[-1], lambda: answer)) is not None:
        assert turn.prompt.startswith(turns[-1].prompt + answer + " ")
        new = turn.prompt.removeprefix(turns[-1].prompt + answer)
        assert 4 <= count_tokens(tokenizer, new) <= 9
        turns.append(turn)
    assert exact(tokenizer, turns)
    assert [turn.turn for turn in turns] == [0, 1, 2]
    assert [turn.think_s for turn in turns] == [0, 1.5, 1.5]
    assert {turn.session for turn in turns} == {0}
    # The same for a chat: what was said, turn by turn.
    assert turns[0].messages is None
    assert turns[2].messages is not None
    assert [message["role"] for message in turns[2].messages] == ["user", "assistant"] * 2 + ["user"]
    assert turns[2].messages[0]["content"] == turns[0].prompt
    assert turns[2].messages[1]["content"] == answer
    assert turns[2].prompt.endswith(answer + " " + turns[2].messages[4]["content"])
    assert all(turn.options["min_tokens"] == turn.output_tokens for turn in turns)


def test_a_session_does_not_depend_on_when_others_end(tokenizer: Tokenizer) -> None:
    sessions = Sessions(turns="uniform:1,3", think_s="lognormal:2,0.5")
    work = Work(input_tokens="uniform:10,30", sessions=sessions, shared_prefix=SharedPrefix(share=1, tokens=8))

    def play(order: list[int]) -> dict[int, list[RequestSpec]]:
        asks = Workload(work, tokenizer, 1).asks()
        open_sessions = {ask.session: [ask] for ask in islice(asks, 8)}
        for session in order:
            while (turn := asks.next_turn(open_sessions[session][-1], lambda: " ant")) is not None:
                open_sessions[session].append(turn)
        return open_sessions

    found = play(list(range(8)))
    assert found == play(list(reversed(range(8))))
    assert {len(turns) for turns in found.values()} == {1, 2, 3}
    assert all(exact(tokenizer, turns) for turns in found.values())
    assert len({turns[0].prompt for turns in found.values()}) == 8
    new = [after.prompt.removeprefix(turn.prompt) for turns in found.values() for turn, after in pairwise(turns)]
    assert len(set(new)) == len(new)


def test_a_session_ends_before_it_is_too_long(tokenizer: Tokenizer) -> None:
    work = Work(input_tokens=20, output_tokens=10, sessions=Sessions(turns=9), max_total_tokens=60)
    asks = Workload(work, tokenizer, 0).asks()
    turn: RequestSpec | None = next(asks)
    last: RequestSpec | None = None
    while turn is not None:
        last, turn = turn, asks.next_turn(turn, lambda: " ant bee")
    assert last is not None
    assert (last.turn, last.input_tokens) == (1, 20 + count_tokens(tokenizer, " ant bee") + 20)


def test_an_answer_that_no_turn_follows_is_not_read(tokenizer: Tokenizer) -> None:
    def unread() -> str:
        raise AssertionError

    single = Workload(Work(), tokenizer, 0).asks()
    assert single.next_turn(next(single), unread) is None
    pair = Workload(Work(sessions=Sessions(turns=2)), tokenizer, 0).asks()
    last = pair.next_turn(next(pair), lambda: " ant")
    assert last is not None
    assert pair.next_turn(last, unread) is None


# What is refused


@pytest.mark.parametrize(
    ("make_work", "message"),
    [
        (lambda: Work(prompts=Path("a"), trace=Path("b")), "both prompts and trace are given; give one of them"),
        (lambda: Work(prompts=Path("a"), input_tokens=5), "input_tokens does not apply to prompts; give one of them"),
        (lambda: Work(sharegpt=Path("a"), output_tokens=5), "output_tokens does not apply to sharegpt; "),
        (lambda: Work(trace=Path("a"), sessions=Sessions(turns=2)), "sessions does not apply to trace; "),
        (lambda: Work(shuffle=True), "shuffle does not apply: there is no file of prompts"),
        (lambda: Work(max_total_tokens=1), "max_total_tokens is 1; give 2 or more"),
        (lambda: Work(options={"temprature": 1}), "options: unknown sampling option 'temprature'; did you mean "),
        (lambda: Work(options={"top_p": 1.5}), "options: top_p is 1.5; give 0 to 1"),
        (lambda: Work(input_tokens="normal:1"), "input_tokens 'normal:1' cannot be drawn from: "),
        (lambda: Work(output_tokens=0), "output_tokens '0' cannot be drawn from: "),
        (lambda: Work(sessions=Sessions(turns=0)), "turns '0' cannot be drawn from: "),
        (lambda: Work(sessions=Sessions(turns=2, think_s="soon")), "think_s 'soon' cannot be drawn from: "),
        (lambda: Work(sessions=Sessions(turns=2, user_tokens=0)), "user_tokens '0' cannot be drawn from: "),
        (lambda: SharedPrefix(share=0, tokens=5), "shared_prefix: share is 0; give more than 0, up to 1"),
        (lambda: SharedPrefix(share=50, tokens=5), "shared_prefix: share is 50; "),
        (lambda: SharedPrefix(share=0.5, tokens=0), "shared_prefix: tokens is 0; give 1 to 16,777,216"),
        (lambda: SharedPrefix(share=0.5, tokens=5, groups=0), "shared_prefix: groups is 0; "),
    ],
)
def test_work_that_contradicts_itself_is_refused(make_work: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_work()
    assert str(caught.value).startswith(message)
