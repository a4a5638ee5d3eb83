"""A store that was started anew, and of which nobody who comes knows that it has lost writes: half of those that were
live have to be heard before anything is decided."""

from __future__ import annotations

from nodeagent.model.node import Cordon
from tests.contract.bench import FAST, LASTING, Bench, refused
from tests.contract.test_restore import read
from tests.contract.test_saved import returns

REGROUP = 60_000
SHORT = 5000
"""Milliseconds of a lease that ends in a recovery."""
USUAL = 1000 * (FAST.credit + FAST.lease)


async def up(bench: Bench, *nodes: str) -> None:
    for node in nodes:
        await bench.join(node, regroup=REGROUP)
        await bench.beat(node)


async def test_half_of_them_are_enough(bench: Bench) -> None:
    bench.timing, usual = LASTING, 1000 * (LASTING.credit + LASTING.lease)
    await up(bench, "n1", "n2", "n3", "n4")
    await bench.restart()
    reply = await bench.beat("n1")
    assert (reply.awaited, reply.recovers > usual) == (("n2", "n3", "n4"), True)
    assert "waits for nodes that may know it: n2, n3, n4;" in await refused("recovering", bench.submit())
    reply = await bench.beat("n1")
    assert (reply.awaited, reply.recovers > usual) == (("n2", "n3", "n4"), True), "it is one, however often it comes"
    reply = await bench.beat("n2")
    assert (reply.awaited, reply.recovering, reply.recovers <= usual) == ((), True, True)
    await bench.usual_time_passes()
    await bench.recovered("n1")
    await bench.submit()


async def test_of_three_two_are_enough(bench: Bench) -> None:
    await up(bench, "n1", "n2", "n3")
    await bench.restart()
    assert (await bench.beat("n1")).awaited == ("n2", "n3")
    await bench.beat("n3")
    assert (await bench.beat("n1")).awaited == ()


async def test_with_fewer_it_waits_and_then_goes_on(bench: Bench) -> None:
    for node in ("n1", "n2", "n3"):
        await bench.join(node, regroup=500)
        await bench.beat(node)
    await bench.restart()
    before = (await bench.beat("n1")).served
    await bench.recovered("n1")
    assert (await bench.beat("n1")).served - before >= 400 + 500 - 100  # credit + lease, regroup; a step's credit
    await bench.submit()


async def test_who_tries_to_join_counts_as_having_come(bench: Bench) -> None:
    await up(bench, "n1", "n2", "n3", "n4")
    await bench.restart()
    await bench.beat("n1")
    await refused("lease_held", bench.join("n2", life="n2-b", regroup=REGROUP))
    assert (await bench.beat("n1")).awaited == ()


async def test_who_was_silent_or_had_left_is_not_counted(bench: Bench) -> None:
    await up(bench, "n1", "n2", "n3", "n4")
    await bench.store.leave("n2", bench.lives["n2"])
    await bench.lapse("n3", "n1")
    await bench.restart()
    reply = await bench.beat("n1")
    assert (reply.awaited, reply.recovers <= USUAL) == ((), True), "n1 is half of n1 and n4"


async def test_an_offer_does_not_shelter_the_dead_for_longer_than_it_is_waited(bench: Bench) -> None:
    """The agent of a node that was cut off with the store offers what its disk has: its life of before lapses as
    soon as the recovery is over and a lease has passed, and not when all could have come."""
    await up(bench, "n1", "n2", "n3", "n4")
    kept = await read(bench, "n4")
    await bench.beat("n4", length=500)
    await bench.restart()
    await bench.store.restore(kept.offer(by="n4", awaited=("n1", "n2", "n3", "n4"), regroup=REGROUP))
    for node in ("n1", "n2", "n3"):
        await bench.beat(node)
    await bench.recovered("n1")
    await bench.until_lapsed("n4", "n1")
    await bench.join("n4", life="n4-b", regroup=REGROUP)


async def test_after_a_second_restart_all_are_counted_again(bench: Bench) -> None:
    await up(bench, "n1", "n2", "n3", "n4")
    await bench.restart()
    await bench.beat("n1")
    await bench.beat("n2")
    await bench.restart()
    assert (await bench.beat("n3")).awaited == ("n1", "n2", "n4")
    assert (await bench.beat("n2")).awaited == ()


async def test_a_second_restart_counts_those_who_were_live_before_the_first(bench: Bench) -> None:
    """Their leases have ended in the recovery: by that alone the one that is there would be all of them."""
    await up(bench, "n1", "n2", "n3", "n4")
    for node in ("n1", "n2", "n3", "n4"):
        await bench.beat(node, length=SHORT)
    await bench.restart()
    await bench.beat("n1")
    await bench.age(2 * SHORT)
    await bench.restart()
    assert (await bench.beat("n1")).awaited == ("n2", "n3", "n4")


async def test_when_a_loss_is_known_all_are_waited_for(bench: Bench) -> None:
    await up(bench, "n1", "n2", "n3")
    kept, old = await bench.keep(), await read(bench, "n2")
    await bench.store.cordon("n3", Cordon(reason="fan", by="ann", at=1.5), "c1")
    new = await read(bench)
    await bench.put_back(kept)
    reply = await bench.beat("n2", era=old.reply.era, rev=old.reply.rev)
    assert reply.awaited == ("n1", "n3")
    await returns(bench, new, "n1", awaited=("n1", "n2", "n3"))
    assert (await bench.beat("n1")).awaited == ("n2", "n3")
    await returns(bench, old, "n2", awaited=("n1", "n2", "n3"))
    assert (await bench.beat("n1")).awaited == ("n3",), "two of three are enough only where nothing is known"


async def test_who_has_called_since_a_loss_is_known_is_not_waited_for_again(bench: Bench) -> None:
    await up(bench, "n1", "n2", "n3")
    kept = await bench.keep()
    await bench.store.cordon("n3", Cordon(reason="fan", by="ann", at=1.5), "c1")
    new = await read(bench)
    await bench.store.cordon("n3", Cordon(reason="disk", by="ann", at=2.5), "c2")
    newer = await read(bench, "n3")
    await bench.put_back(kept)
    await returns(bench, new, "n1", awaited=("n1", "n2", "n3"))
    assert (await bench.beat("n2")).awaited == ("n3",)
    await bench.store.restore(newer.offer(by="n3", awaited=("n1", "n2", "n3"), regroup=REGROUP))
    assert (await bench.beat("n1")).awaited == ("n3",), "what n2 knows has been offered, whether or not it lives"


async def test_of_many_only_the_first_are_named(bench: Bench) -> None:
    """A reply to each of 2,000 nodes must not name 2,000."""
    names = [f"n{i}" for i in range(1, 10)]
    await up(bench, *names)
    await bench.restart()
    reply = await bench.beat("n9")
    assert (reply.awaited, reply.awaits) == (("n1", "n2", "n3", "n4", "n5"), 8)
    assert "may know it: n1, n2, n3, n4, n5 and 3 more;" in await refused("recovering", bench.submit())
    reply = await bench.beat("n2")
    assert (reply.awaited, reply.awaits) == (("n1", "n3", "n4", "n5", "n6"), 7)
