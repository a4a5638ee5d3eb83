"""Limits of users in words, for ``doctor`` and ``describe``. Pure: the agent's JSON in, a sentence out."""

from __future__ import annotations

from typing import Any

from nodeagent.ctl.output import size

Json = dict[str, Any]


def limits_text(limits: Json) -> str:
    """The values of ``limits``."""
    submit = limits["submit"]
    named = [*submit["users"], *(f"group {group}" for group in submit["groups"])]
    return (
        f"{limits['jobs']} live jobs, {size(limits['job_bytes'])}B of job specs, "
        f"{limits['requests']} requests a second, {limits['concurrent']} at once, {limits['followers']} followers; "
        f"of a job: {_most(limits['nodes_per_job'])} nodes, {_most(limits['restarts_per_job'])} restarts an hour; "
        f"may submit: {', '.join(named) or 'everybody'}"
    )


def used_text(limits: Json) -> str:
    """What the owner of a job uses of them."""
    used, values = limits["used"], limits["values"]
    return (
        f"{limits['owner']} has {used['jobs']} of {values['jobs']} live jobs, {size(used['job_bytes'])}B of "
        f"{size(values['job_bytes'])}B of job specs; at {limits['node']} "
        f"{used['concurrent']} of {values['concurrent']} requests under way, "
        f"{used['followers']} of {values['followers']} followers"
    )


def _most(number: int | None) -> str:
    return "any number of" if number is None else f"at most {number}"
