"""What a job file says of the container and of the site's environment modules: their values, and what does not go
together with a container. Pure.

Each name goes into a command line of the job's user on every node, so this module says what it may be made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nodeagent.model.jobspec import Container, JobSpec
from nodeagent.spec import jobvalues, units
from nodeagent.spec.consistency import Mistake
from nodeagent.spec.errors import CheckError, did_you_mean, raise_all

MOST_MODULES = 32
MOST_BINDS = 64
KEYS = ("image", "runtime", "binds")
PODMAN, APPTAINER = "podman", "apptainer"
_STORED = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,511}")
"""A name in an image store, with its registry, tag or digest."""
_PATH = re.compile(r"/[^\0-\x1f:,]*")
"""What a runtime's options can hold: they separate with colons and commas."""
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/@-]{0,127}")
_EXAMPLE = "/shared/images/torch.sif (Apptainer), localhost/torch:2.6 (podman) or {image: ..., binds: [...]}"
_BIND: dict[str, Any] = {"type": "string", "pattern": "^/[^:]*(:/[^:]*)?(:ro)?$"}
SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "properties": {
                "image": {"type": "string", "minLength": 1},
                "runtime": {"enum": [PODMAN, APPTAINER]},
                "binds": {"type": "array", "items": _BIND, "maxItems": MOST_BINDS},
            },
            "required": ["image"],
            "additionalProperties": False,
        },
    ]
}


def container(value: object) -> Container | None:
    """``IMAGE``, or ``{image: IMAGE, runtime: podman, binds: [/data:/data:ro]}``."""
    if value is None:
        return None
    written: Mapping[Any, Any] = value if isinstance(value, dict) else {"image": value}
    bad = [CheckError(f"unknown key '{k}'", did_you_mean(str(k), KEYS), (k,)) for k in written if k not in KEYS]
    image = written.get("image")
    if "image" not in written:
        bad.append(CheckError("the key 'image' is missing", f"write for instance {_EXAMPLE}"))
    runtime = written.get("runtime") or (APPTAINER if str(image).endswith(".sif") else PODMAN)
    if runtime not in (PODMAN, APPTAINER):
        right = did_you_mean(str(runtime), (PODMAN, APPTAINER), intro="they are")
        bad.append(CheckError(f"{units.show(runtime)} is not a runtime that is known here", right, ("runtime",)))
    elif "image" in written:
        at = ("image",) if isinstance(value, dict) else ()
        bad += [CheckError(e.what, e.right, at) for e in _image_mistakes(image, str(runtime))]
    binds = written.get("binds") or ()
    if not isinstance(binds, list | tuple):
        bad.append(CheckError(f"{units.show(binds)} is not a list", "write [/data:/data:ro]", ("binds",)))
        binds = ()
    if len(binds) > MOST_BINDS:
        bad.append(CheckError(f"{len(binds)} binds, more than {MOST_BINDS}", "bind a folder above them", ("binds",)))
    for i, bind in enumerate(binds):
        bad += [CheckError(e.what, e.right, ("binds", i)) for e in _bind_mistakes(bind)]
    raise_all(bad)
    return Container(runtime=runtime, image=str(image), binds=tuple(whole_bind(str(bind)) for bind in binds))


def whole_bind(bind: str) -> str:
    """``/data`` and ``/data:ro`` are seen at the same path."""
    path, _, rest = bind.partition(":")
    return bind if rest.startswith("/") else f"{path}:{path}" + (":ro" if rest else "")


def _image_mistakes(image: object, runtime: str) -> Iterator[CheckError]:
    if not isinstance(image, str) or not image:
        yield CheckError(f"{units.show(image)} is not an image", f"write {_EXAMPLE}")
    elif "://" in image:
        right = f"get it onto the nodes first ({PODMAN} pull, {APPTAINER} build) and write its name there"
        yield CheckError(f"{units.show(image)} is not on the nodes, and nodeagent fetches no images", right)
    elif _is_path(image, runtime):
        if not _PATH.fullmatch(image if image.startswith("/") else f"/{image}") or "~" in image or "$" in image:
            yield CheckError(f"{units.show(image)} is not a path", "write it whole, without ':', ',', '~' and '$'")
        yield from _unprintable(image)
    elif not _STORED.fullmatch(image):
        yield CheckError(f"{units.show(image)} is not an image's name", "write it as `podman images` shows it")


def _is_path(image: str, runtime: str) -> bool:
    """A name of podman's store may have slashes in it."""
    return runtime == APPTAINER or image.startswith(("/", "./", "../"))


def _bind_mistakes(bind: object) -> Iterator[CheckError]:
    if not isinstance(bind, str):
        yield CheckError(f"{units.show(bind)} is not a bind", "write /data:/data:ro")
        return
    source, _, rest = whole_bind(bind).partition(":")
    to, _, mode = rest.partition(":")
    if not _PATH.fullmatch(source) or not _PATH.fullmatch(to) or mode not in ("", "ro"):
        right = "write FROM:TO or FROM:TO:ro, both as whole paths without ',', such as /data:/data:ro"
        yield CheckError(f"{units.show(bind)} is not a bind", right)
    yield from _unprintable(bind)


def _unprintable(path: str) -> Iterator[CheckError]:
    try:
        jobvalues.printable(path)
    except CheckError as error:
        yield error


def resolved(found: Container | None, working_dir: str) -> Container | None:
    """With an image that is a path as seen from the working folder."""
    if found is None or not _is_path(found.image, found.runtime):
        return found
    return found.model_copy(update={"image": jobvalues.resolve(found.image, working_dir)})


def site_modules(value: object) -> tuple[str, ...]:
    """Names as the site's ``module`` command takes them."""
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise CheckError(f"{units.show(value)} is not a list of modules", f"write [{value}]")
    if len(value) > MOST_MODULES:
        raise CheckError(f"{len(value)} modules, more than {MOST_MODULES}", "make one module of them")
    raise_all(
        CheckError(f"{units.show(name)} is not an environment module's name", "write it as module avail does", (i,))
        for i, name in enumerate(value)
        if not isinstance(name, str) or not _MODULE.fullmatch(name)
    )
    return tuple(value)


def written_container_mistakes(tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """Of a job file with a container: what stands beside it and would do nothing."""
    if tree.get("container") is None:
        return
    if tree.get("fork_server") in (True, "on"):
        what = "fork_server: on has no meaning in a container, whose workers start from nothing"
        yield Mistake(("fork_server",), what, "remove it")
    try:
        found = container(tree["container"])
    except CheckError:  # reported where values are checked
        found = None
    roles = tree.get("roles")
    alone = {
        str(name): role.get("restart") == "alone" or _does_alone(role.get("policies"))
        for name, role in (roles if isinstance(roles, dict) else {}).items()
        if isinstance(role, dict)
    }
    limits = tree.get("limits")
    yield from _beside(bool(tree.get("preload")), alone, limits if isinstance(limits, dict) else {}, found)


def _does_alone(policies: object) -> bool:
    written = policies if isinstance(policies, list | tuple) else ()
    return any(isinstance(one, dict) and one.get("do") in ("RestartPod", "RestartTask") for one in written)


def container_mistakes(spec: JobSpec) -> Iterator[Mistake]:
    """Of a job that somebody may have written by hand."""
    if spec.container is None:
        return
    if spec.fork_server:
        yield Mistake(("fork_server",), "fork server has no meaning in a container", "set it to false")
    for key, path in {"working_dir": spec.working_dir, "checkpoint_dir": spec.checkpoint_dir}.items():
        if path is not None and not (_PATH.fullmatch(path) and path.strip("/")):
            right = "use another folder, whose path has neither ':' nor ','"
            yield Mistake((key,), f"{units.show(path)} cannot be seen in a container", right)
    alone = {role.name: any(scope != "gang" for _, scope in role.alone) for role in spec.roles}
    yield from _beside(bool(spec.preload), alone, spec.limits, spec.container)


def _beside(
    preload: bool, alone: Mapping[str, bool], limits: Mapping[str, object], found: Container | None
) -> Iterator[Mistake]:
    if preload:
        what = "preload has no meaning in a container, whose workers start from nothing"
        yield Mistake(("preload",), what, "remove it")
    for name, is_alone in alone.items():
        if is_alone:
            what = "a worker in a container cannot be started again alone yet"
            yield Mistake(("roles", name, "restart"), what, "remove it: the gang is formed anew")
    if "as" in limits and (found is None or found.runtime == PODMAN):
        yield Mistake(("limits", "as"), "podman knows no such limit", "remove it, or use runtime: apptainer")
