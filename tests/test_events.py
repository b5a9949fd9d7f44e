from flyweight.events import emit, listening


def test_events_reach_listeners_inside_the_block_only():
    seen = []
    emit("before")
    with listening(seen.append):
        emit("progress", done_bytes=3, total_bytes=9)
        with listening(seen.append):
            emit("twice")
    emit("after")
    assert [event.kind for event in seen] == ["progress", "twice", "twice"]
    assert seen[0].fields == {"done_bytes": 3, "total_bytes": 9}
