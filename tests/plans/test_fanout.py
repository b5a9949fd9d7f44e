"""Who reads from whom: the trainer sends once per group, and nobody reads from one that is gone."""

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.errors import FormatError, SpecError
from flyweight.plans.fanout import (
    FORWARDER_SLOTS,
    MAX_NODES,
    MAX_TEXT_BYTES,
    TRAINER,
    Holder,
    Node,
    decode_nodes,
    fan_out,
    nearest,
)


def nodes(text):
    return decode_nodes(text.replace(";", "\n").encode(), "test")


def shape(plan):
    return " ".join(f"{plan.parent(name) or '.'}>{name}" for name in sorted(plan.nodes))


def test_a_group_is_a_chain_in_which_the_replicas_of_a_host_are_neighbours():
    plan = fan_out(nodes("a one; b two; c one; d two; e three"))
    assert shape(plan) == ".>a c>b a>c b>d d>e"
    assert [plan.depth(name) for name in "acbde"] == [1, 2, 3, 4, 5]
    assert (plan.children(TRAINER), plan.children("c"), plan.children("e")) == (["a"], ["b"], [])
    assert [*plan.ancestors("b")] == ["c", "a", TRAINER]


def test_groups_do_not_read_from_each_other():
    plan = fan_out(nodes("a one x; b one y; c two x; d two y"))
    assert shape(plan) == ".>a .>b a>c b>d"
    assert plan.num_sent() == {"x": 1, "y": 1}


def test_with_a_larger_degree_several_hosts_read_from_the_last_replica_of_one():
    plan = fan_out(nodes("a one; b one; c two; d three; e four; f five"), degree=2)
    assert shape(plan) == ".>a a>b b>c b>d c>e c>f"


def test_replicas_that_cannot_forward_read_from_those_that_can_first_of_their_own_host():
    found = [
        Node("a", "one", can_forward=False),
        Node("b", "one", num_slots=FORWARDER_SLOTS - 1),
        Node("c", "one"),
        Node("d", "two"),
        Node("e", "three", can_forward=False),
        Node("f", "three", can_forward=False),
    ]
    assert shape(fan_out(found)) == "c>a c>b .>c c>d d>e c>f"
    assert fan_out(found[:2]).num_sent() == {"": 2}  # nobody else has it
    last = fan_out([Node("a", "one"), Node("b", "one"), Node("c", "one", can_forward=False)])
    assert shape(last) == ".>a a>b b>c"


def test_children_of_a_lost_or_slow_replica_read_from_its_parent():
    plan = fan_out(nodes("a one; b two; c three; d four"))
    assert shape(plan.without("b")) == ".>a a>c c>d"
    assert shape(plan.without("a").without("b")) == ".>c c>d"
    assert shape(plan.as_leaf("b")) == ".>a a>b a>c c>d"
    assert shape(plan.as_leaf("b", at_trainer=True)) == ".>a .>b a>c c>d"
    assert shape(plan) == ".>a a>b b>c c>d"


@given(
    st.lists(st.tuples(st.sampled_from("pqrs"), st.sampled_from("xy"), st.booleans()), max_size=12),
    st.integers(1, 3),
)
def test_all_replicas_are_reached_and_each_group_leaves_the_trainer_once(found, degree):
    some = [Node(f"{n}", *each) for n, each in enumerate(found)]
    plan = fan_out(some, degree=degree)
    assert plan == fan_out(some, degree=degree)
    for node in some:
        *above, last = plan.ancestors(node.name)
        assert last == TRAINER
        assert all(plan.nodes[name].is_forwarder for name in above)
        assert all(plan.nodes[name].group == node.group for name in above)
        if node.is_forwarder:
            others = [each for each in plan.children(node.name) if plan.nodes[each].is_forwarder]
            assert len(others) <= (
                degree if others and plan.nodes[others[0]].host != node.host else 1
            )
    for group, host in product("xy", "pqrs"):
        alike = [node for node in some if node.group == group and node.is_forwarder]
        entering = [
            node
            for node in alike
            if node.host == host
            and (
                plan.parent(node.name) == TRAINER or plan.nodes[plan.parent(node.name)].host != host
            )
        ]
        assert len(entering) <= 1
        if alike:
            assert plan.num_sent()[group] == 1
    names = [link["name"] for link in plan.record()["links"]]
    assert sorted(names) == sorted(plan.nodes)
    assert all(names.index(plan.parent(n)) < names.index(n) for n in names if plan.parent(n))


def test_a_record_is_plain_data_with_hops_and_bytes():
    plan = fan_out(nodes("a one x; b two x; c one y"))
    found = plan.record({"x": 100, "y": 7})
    assert json.loads(json.dumps(found)) == found
    assert found["groups"][0] == {
        "group": "x",
        "num_replicas": 2,
        "num_hops": 2,
        "num_sent": 1,
        "sent_bytes": 100,
    }
    assert [tuple(each.values()) for each in found["links"]] == [
        ("a", "one", "x", "", 1, 100),
        ("b", "two", "x", "a", 2, 100),
        ("c", "one", "y", "", 1, 7),
    ]
    sent = plan.as_leaf("b", at_trainer=True).record({"x": 100, "y": 7})["groups"][0]
    assert (sent["num_sent"], sent["sent_bytes"]) == (2, 200)
    assert plan.record()["groups"][0]["sent_bytes"] is None


def test_the_nearest_holder_is_on_the_same_host_then_an_idle_replica_then_the_trainer():
    found = [
        Holder("files", "", "snapshot"),
        Holder("trainer", "one", "trainer"),
        Holder("busy", "two", "replica", 2),
        Holder("idle", "three", "replica"),
        Holder("here", "four", "replica", 9),
    ]

    def order(host):
        return [each.name for each in nearest(found, host)]

    assert order("four") == ["here", "idle", "busy", "trainer", "files"]
    assert order("one") == ["trainer", "idle", "busy", "here", "files"]
    found.append(Holder("also idle", "five", "replica"))
    assert order("two") == ["busy", "also idle", "idle", "here", "trainer", "files"]


def test_a_file_of_replicas_is_lines_or_json():
    text = '[{"name": "a", "host": "one", "group": "x"}, {"name": "b", "host": "two", "can_forward": false}]'
    assert decode_nodes(text.encode(), "f") == [
        Node("a", "one", "x"),
        Node("b", "two", can_forward=False),
    ]
    assert nodes("# a comment;;  a   one\tx \r; b two") == [Node("a", "one", "x"), Node("b", "two")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 replicas"),
        ("[]", "0 replicas"),
        ("a", "line 1: 1 words"),
        ("a b c d", "line 1: 4 words"),
        ("a one\na two", "names 'a' twice"),
        ("[1]", "Expected `object`"),
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('[{"name": "", "host": "one"}]', "length >= 1"),
        ('[{"name": "a"}]', "missing required field `host`"),
        ('[{"name": "a", "host": "one", "gruop": "x"}]', "unknown field `gruop`"),
        ('[{"name": "a", "host": "one", "num_slots": 0}]', ">= 1"),
        ('[{"name": "a\\u001b[31m", "host": "one"}]', "cannot be printed"),
        ('[{"name": "\\ud800", "host": "one"}]', "cannot be printed"),
        ("a " + "h" * 256, "length <= 255"),
        ("\n".join(f"{n} h" for n in range(MAX_NODES + 1)), f"{MAX_NODES + 1} replicas"),
        ("#" * (MAX_TEXT_BYTES + 1), f"more than {MAX_TEXT_BYTES} bytes"),
        (b"a \xff", "not UTF-8"),
    ],
    ids=range(18),
)
def test_what_is_no_file_of_replicas_is_refused(text, words):
    with pytest.raises(FormatError, match="'f'") as caught:
        decode_nodes(text if isinstance(text, bytes) else text.encode(), "'f'")
    assert words in str(caught.value)


def test_what_makes_no_fan_out_is_refused():
    with pytest.raises(SpecError, match="'a'"):
        fan_out([Node("a", "one"), Node("a", "two")])
    with pytest.raises(SpecError, match="trainer"):
        fan_out([Node("", "one")])
    with pytest.raises(SpecError, match="degree is 0"):
        fan_out([Node("a", "one")], degree=0)
