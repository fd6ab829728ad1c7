"""Replacement of the models of a running server by newly built ones, and the way back where one does not load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trtpipe.engines.errors import ArtefactRefused, HostError, StageFailed, TrtpipeError, UsageError
from trtpipe.engines.passport import Passport, read_passport
from trtpipe.pipeline import compatibility
from trtpipe.pipeline.execution.diagnosis import explain
from trtpipe.pipeline.gateway import process as gateway_process
from trtpipe.pipeline.gateway.options import ServedModel
from trtpipe.pipeline.run_folder import find_run
from trtpipe.pipeline.serving import model_control, model_links, server_log
from trtpipe.pipeline.serving.gpu_memory import require_room
from trtpipe.pipeline.serving.launch_options import gateway_models
from trtpipe.pipeline.serving.repositories import called, check_passport, find_repository, imports
from trtpipe.pipeline.serving.serve import gateway_log, smoke
from trtpipe.pipeline.serving.servers import Served, Server, as_recorded, find_running, reloading, remember, require_own
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.check import check_repository, require_sound
from trtpipe.triton_repo.layout import ENGINE_FOLDER, model_names


def reload_models(
    store: Store, name: str | None, target: str | None, *, allow_model_code: bool = False
) -> tuple[Server, list[Served]]:
    """Load the current repositories of a running server's targets, model by model, without ending it; with `target`
    that one alone, of the server that serves it where no `name` is given. Then its gateway takes their tokenizers,
    lengths and adapters. Returns the server and what was loaded.

    Raises UsageError for a server of another user; HostError for one that does not answer, while another command
    reloads it, and for an engine that has no room beside the old one; InputDataError for a repository that would not
    load, ArtefactRefused for an engine of another kind, StageFailed with the server's message when a model does not
    load: the server then keeps what it has, and so it does at a Ctrl-C.
    """
    found = find_running(store, name, target)
    require_own(found)
    with reloading(store, found.name):
        return _reload(store, find_running(store, found.name), target, allow_model_code=allow_model_code)


def _reload(store: Store, server: Server, target: str | None, *, allow_model_code: bool) -> tuple[Server, list[Served]]:
    if server.native:
        raise UsageError(
            f"{server.name} is served by its runtime's own server", why="that cannot change its model",
            remedy="stop it, and serve the new one",
        )  # fmt: skip
    sources = {one.name: _source(one) for one in server.served}
    if not model_control.answers(server.endpoints):
        raise HostError(
            f"{server.name} does not answer at {server.endpoints.http_url}",
            remedy=f"stop it, and serve it again; its log is {server.log}",
        )
    if target is None:
        fresh = {name: find_repository(source) for name, source in sources.items()}
    else:
        known = [sources[one.name] for one in server.served if one.target == target and find_run(target) is None]
        found = find_repository(known[0] if known else target)
        # A server's only target may be replaced by a target of another name.
        fresh = {server.find(found.name if len(server.served) > 1 else None).name: found}
    for one in server.served:
        if one.name in fresh:
            compatibility.require_trusted(one.name, fresh[one.name].folder, store, allow_code=allow_model_code)
            passport = _require_same_kind(one, fresh[one.name].folder)
            place = called(fresh[one.name].name, fresh[one.name].folder)
            faults = check_repository(fresh[one.name].folder)
            require_sound(place, faults, remedy=f"run `trtpipe check {place}` for all")
            require_room(one.name, [old.repository for old in server.served], fresh[one.name].folder, passport)
    served = tuple(
        replace(one, repository=now.folder, source=now.source, imported=imports(now))
        if (now := fresh.get(one.name)) else one
        for one in server.served
    )  # fmt: skip
    loaded = [one for one in served if one.name in fresh]
    folder = store.home / "servers" / server.name
    stale = list((folder / "linked").iterdir())
    _load_instead(store, server, served, loaded, folder)
    renewed = replace(as_recorded(store, server), served=served)
    remember(store, renewed)
    for left in stale:
        shutil.rmtree(left, ignore_errors=True)
    return renewed, loaded


def _load_instead(
    store: Store, server: Server, served: tuple[Served, ...], loaded: Sequence[Served], folder: Path
) -> None:
    """Load the models of `loaded`, part of `served`, into a running server, and let its gateway serve them. Raises
    StageFailed, or the gateway's error; the server is as before then, and after an interrupt too, unless the error says
    that it did not take back its models, or that it has ended."""
    renewed = replace(server, served=served)
    gateway: int | None = None
    models = _gateway_models(renewed, folder)
    before = {link.name: link.readlink() for link in (folder / "models").iterdir()}
    wanted = model_links.folders(served, folder)
    begin = server_log.size(server.log)
    changed: list[str] = []
    try:
        model_links.link(wanted, folder)
        for one in loaded:
            names = [one.model(name) for name in model_names(one.repository)]
            changed += names  # at once: the load of an ensemble loads its parts
            model_control.load_models(server.endpoints, names, server.log, seconds=server.ready_s)
            smoke(renewed, one)
        for name in sorted(before.keys() - wanted):
            changed.append(name)
            model_control.unload_model(server.endpoints, name, server.log)
        now = as_recorded(store, server)  # the watchdog may have started the gateway again
        if now.gateway_pid is not None and gateway_process.alive(now.gateway_pid):
            gateway = now.gateway_pid
            gateway_process.reload(gateway, models, gateway_log(server))
    except BaseException as error:
        model_links.link(before, folder)
        outcomes = server_log.loads(server.log, begin)
        # An ensemble that does not fit the model that stayed fails before that model's own load is asked for.
        causes = [
            StageFailed(f"{name} does not load", why=reason, remedy=f"the server's log is {server.log}")
            for name, reason in outcomes.items()
            if reason and isinstance(error, StageFailed)
        ]
        cause = causes[0] if causes else error
        if isinstance(cause, StageFailed):  # before the log tells of the models that are taken back
            cause = explain(cause, server.log, "serve", begin)
        if not server.alive:
            raise StageFailed(
                f"tritonserver of {server.name} ended while it loaded other models", why=str(cause),
                remedy=f"its log is {server.log}; `trtpipe ps` says whether it is started again",
            ) from error  # fmt: skip
        if not model_control.answers(server.endpoints):
            raise StageFailed(
                f"{server.name} does not answer, and may not have taken back its models", why=str(cause),
                remedy=f"stop it, and serve it again; its log is {server.log}",
            ) from error  # fmt: skip
        # What failed goes on as it was, and there may be no room for a second copy of it.
        kept = {name for name, reason in outcomes.items() if reason and model_control.ready(server.endpoints, name)}
        lost = _take_back(
            server, {name: before[name] for name in changed if name in before and name not in kept}, wanted
        )
        if not lost:
            for left in {path.parent for path in wanted.values()}:
                shutil.rmtree(left, ignore_errors=True)
        if gateway is not None and not isinstance(error, TrtpipeError):  # it may take the new models yet
            gateway_process.reload(gateway, _gateway_models(server, folder), gateway_log(server))
        if lost:
            raise StageFailed(
                f"{server.name} did not take back its models", why="; ".join([str(cause), *lost]),
                remedy="stop it, and serve it again",
            ) from error  # fmt: skip
        raise cause from None


def _take_back(server: Server, models: Mapping[str, Path], instead: Mapping[str, Path]) -> list[str]:
    """Load the models of these folders again, which links lead to; the server may have loaded those of `instead`.
    Returns what did not succeed."""
    failures: dict[str, str] = {}
    for name, folder in models.items():
        model_links.renew(folder, instead.get(name, folder))
    left = list(models)
    for _ in range(2):  # an ensemble that does not fit one of its parts loads once that part has been loaded
        failures = {}
        for name in left:
            try:
                model_control.load_models(server.endpoints, [name], server.log, seconds=server.ready_s)
            except StageFailed as failure:
                failures[name] = str(failure)
        left = list(failures)
    return list(failures.values())


def _gateway_models(server: Server, folder: Path) -> tuple[ServedModel, ...]:
    passports = [read_passport(one.repository / ENGINE_FOLDER) for one in server.served]
    return gateway_models(server.served, passports, folder / "models")


def _source(served: Served) -> str:
    """Argument of `find_repository` for a served target: the folder it came from, whatever the current folder is.
    Raises UsageError where the record names none, as those of 0.1 do: the signal to reload would end its gateway."""
    if served.source is None:
        raise UsageError(
            f"an earlier version of trtpipe started the server of {served.name}", remedy="stop it, and serve it again"
        )
    return str(served.source)


def _require_same_kind(served: Served, repository: Path) -> Passport:
    """The passport of the engine of `repository`, which is to replace that of a served target. Raises ArtefactRefused
    where the server, which is of one runtime and release, cannot run it."""
    passport = check_passport(served.name, repository)
    before = read_passport(served.repository / ENGINE_FOLDER)
    if (passport.runtime, passport.image, passport.world_size) != (before.runtime, before.image, before.world_size):
        raise ArtefactRefused(
            f"the server of {served.name} runs {_kind(before)}",
            why=f"the new engine is for {_kind(passport)}",
            remedy="stop the server and serve the new one",
        )
    return passport


def _kind(passport: Passport) -> str:
    """Runtime, release and ranks of an engine, in words."""
    program = f"{passport.runtime} {passport.image or ''}".rstrip()
    return f"{program} with {passport.world_size} rank(s)"
