#!/bin/sh
# Installs, upgrades, rolls back and removes nodeagent on this node. Needs root, a Python >= 3.11, and no network: the
# wheels lie beside this file.
#
#   setup.sh install     install or upgrade; a running agent is restarted, and training goes on meanwhile
#   setup.sh status      which version this bundle is; exit code 3 where it is not the one in use
#   setup.sh rollback    back to the version before
#   setup.sh remove      remove the program; config, state and logs stay. Refused while workers run here: drain the node
#                        first (nodeagentctl drain NODE --reason TEXT), or say --drain
#   setup.sh purge       remove, and config, keys, state and logs too
#
# Options: --drain (remove, purge: let the jobs leave first), --no-restart (install, rollback: you start or
# restart the agent).
#
# Each version lies in a folder of its own, and /opt/nodeagent/bin points to the one in use: shims, workers and the
# lease process that were started by the old version find all of their files until the last of them has ended.
# A version that does not start is left again: the agent runs the one before, by the unit of that version.
# Exit codes: 0 done, 1 failed (what was in use is in use), 2 usage, 3 not in use, 6 refused.
set -eu
umask 022 # the jobs' users run what is installed

prefix=/opt/nodeagent
etc=/etc/nodeagent
state=/var/lib/nodeagent
logs=/var/log/nodeagent
run=/run/nodeagent
here=$(cd "$(dirname "$0")" && pwd)
# The .deb's script says FILES=no to `install`: dpkg has brought the files outside of the prefix.
files=${FILES:-yes}
# Where a bundle's lie. Of the package's the units alone are written, to be those of the version in use.
programs=/usr/local/bin
units=/etc/systemd/system
packaged_units=/usr/lib/systemd/system
sysusers=/etc/sysusers.d
tmpfiles=/etc/tmpfiles.d
needrestart=/etc/needrestart/conf.d
man=/usr/local/share/man
bash_completion=/usr/local/share/bash-completion/completions/nodeagentctl
zsh_completion=/usr/local/share/zsh/site-functions/_nodeagentctl
patience=120 # seconds for jobs to leave, on top of their own grace
starting=60  # seconds for the agent before to end and the next one to start
settling=5   # seconds after which an agent that has started must still run
lock=/run/nodeagent-setup.lock
turn=300 # seconds for another setup to end

say() { printf '%s\n' "nodeagent: $*"; }
die() {
    code=$1
    shift
    printf '%s\n' "nodeagent: $*" >&2
    exit "$code"
}
usage() {
    sed -n '5,14s/^#   \{0,1\}//p' "$0" >&2
    exit 2
}
# One at a time: a second install would remove the folder that the first one fills. Root alone may open the lock, for
# whoever can open it can hold it.
alone() {
    umask 077
    exec 9>>"$lock"
    umask 022
    flock -n 9 && return
    say "another setup is at work on this node, and is waited for"
    flock -w "$turn" 9 || die 6 "another setup has been at work for $turn s; nothing has been changed. Do this again" \
        "when it has ended"
}
booted() { [ -d /run/systemd/system ]; }
current() { readlink "$prefix/bin" 2>/dev/null | sed 's|^versions/||; s|/bin$||'; }
# The version that the unit's agent runs; empty where it runs none from here.
running() {
    pid=$(systemctl show -P MainPID nodeagent)
    tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | sed -n "1s|^$prefix/versions/\([^/]*\)/bin/.*|\1|p"
}
# Whether a bundle was installed last, and not the .deb.
bundled() { [ "$(readlink "$programs/nodeagent")" = "$prefix/bin/nodeagent" ]; }
# What does once more what failed.
again() { if [ "$files" = yes ]; then echo "sh $here/${0##*/} $verb"; else echo "dpkg --configure nodeagent"; fi; }

# Processes that were started from a version's folder: one line each, its id and its command.
users_of() {
    for process in /proc/[0-9]*; do
        tr '\0' ' ' 2>/dev/null <"$process/cmdline" | grep -F -e "$1/" | sed "s|^|${process#/proc/} |" || true
    done
}
every_shim() { users_of "$prefix/versions" | grep -F -e '-m nodeagent.shim ' || true; }
# All but those of people's own clusters (nodeagentctl local, run --local), whose nodes' folders lie beside a
# cluster.json. Which agent it was that started the others need not be known.
shims() {
    every_shim | while read -r pid command; do
        node=${command#* -m nodeagent.shim }
        node=${node%/pods/*}
        if grep -qs '/nodeagent\.slice/' "/proc/$pid/cgroup" || [ ! -e "${node%/*}/cluster.json" ]; then
            echo "$pid"
        fi
    done
}
# Agents that are not the unit's: nobody here can stop them. (Those of people's own clusters are called otherwise.)
strays() {
    unit=0
    ! booted || unit=$(systemctl show -P MainPID nodeagent)
    users_of "$prefix/versions" | grep -E '/nodeagent run( |$)' | cut -d' ' -f1 | grep -vx -e "$unit" || true
}

# The first Python that this bundle has compiled wheels for.
find_python() {
    for python in python3 python3.11 python3.12 python3.13 python3.14; do
        tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])' 2>/dev/null) || continue
        for wheel in "$here"/wheels/pydantic_core-*-"$tag"-*.whl; do
            [ -e "$wheel" ] && command -v "$python" && return
        done
    done
    have=$(for w in "$here"/wheels/pydantic_core-*.whl; do echo "$w"; done | sed 's/.*-cp3\([0-9]*\)-cp.*/3.\1/' | sort -u)
    die 1 "no Python here that these wheels are for ($(echo "$have" | tr '\n' ' ')): install one, or build a bundle for" \
        "yours: make packages PYTHONS=3.N"
}

# An agent that somebody disabled stays so: only a first install enables it. $was: the version that was in use, if any.
restart() {
    booted || {
        say "systemd does not run here: start the agent yourself, and end one that runs the version before"
        return
    }
    systemd-sysusers nodeagent.conf
    systemctl daemon-reload
    if ! systemctl is-active --quiet nodeagent; then
        start
        return
    fi
    runs=$(running) # not what was in use, where an install or a rollback ended before its restart
    was=${runs:-$was}
    if [ "$was" = "$(current)" ]; then
        say "the agent runs it already, and was left alone"
    elif [ "$restart" != yes ]; then
        say "the agent still runs ${was:-another version}: systemctl restart nodeagent"
    else
        since=$(date '+%F %T')
        starts || go_back
        say "the agent has been restarted; training went on"
    fi
}

# What does not run now.
start() {
    if [ "$restart" != yes ]; then
        say "the agent does not run, and was not started: systemctl enable --now nodeagent"
        return
    fi
    if [ -z "$was" ]; then
        systemctl enable --quiet nodeagent
    elif ! systemctl is-enabled --quiet nodeagent; then
        say "the agent is disabled, and stays so: systemctl enable --now nodeagent"
        return
    fi
    if [ -e "$etc/cluster.key" ]; then
        systemctl restart --no-block nodeagent
        say "the agent did not run, and starts: systemctl status nodeagent"
    else
        say "no $etc/cluster.key yet. Make one for the cluster (nodeagent keygen $etc/cluster.key), copy it to every" \
            "node, write $etc/nodeagent.yaml, then: systemctl start nodeagent"
    fi
}

# Whether the agent starts, and is the same process some seconds later.
starts() {
    # The agent before may take longer to end where the store is away; systemd bounds that.
    until timeout "$starting" systemctl restart nodeagent; do
        [ "$(systemctl show -P ActiveState nodeagent)" = deactivating ] || return 1
    done
    pid=$(systemctl show -P MainPID nodeagent)
    sleep "$settling"
    systemctl is-active --quiet nodeagent && [ "$(systemctl show -P MainPID nodeagent)" = "$pid" ]
}

# After a start that failed: the version before is in use again, and so is what `rollback` goes back to.
go_back() {
    failed=$(current)
    log="its log: journalctl -u nodeagent --since '$since'"
    mend="Mend what the log says, then"
    [ -n "$was" ] || die 1 "the agent of $failed does not start; $log. $mend: systemctl restart nodeagent"
    bring_files "$was"
    files_to_disk || say "the unit of $was may not be on the disk (above)"
    use "$was"
    if [ "${older:-versions/$was}" != "versions/$was" ]; then
        ln -sfn "$older" "$prefix/previous"
    else
        rm -f "$prefix/previous"
    fi
    systemctl daemon-reload
    starts || die 1 "the agent of $failed does not start, and that of $was, which is in use again, does not either:" \
        "this node has no agent; $log. $mend: systemctl restart nodeagent"
    failure="the agent of $failed does not start; $log. The agent of $was runs again. $mend: $(again)"
    [ "$files" = no ] || die 1 "$failure"
    die 1 "$failure. Or keep $was: dpkg -i its .deb. Until then the package is half-configured, and apt tries to" \
        "start $failed again whenever it installs anything"
}

use() {
    ln -sfn "versions/$1/bin" "$prefix/bin.new"
    mv -fT "$prefix/bin.new" "$prefix/bin"
}

switch_to() {
    was=$(current)
    older=$(readlink "$prefix/previous" 2>/dev/null) || true
    bring_files "$1"
    files_to_disk || {
        [ -z "$was" ] || bring_files "$was"
        die 1 "the unit of $1 could not be written to the disk (above); nothing has been switched. Mend that, then:" \
            "$(again)"
    }
    [ "$was" != "$1" ] || return 0
    [ -z "$was" ] || ln -sfn "versions/$was" "$prefix/previous"
    use "$1"
}

# Versions that are neither in use, nor the one to roll back to, nor run by anybody.
prune() {
    for folder in "$prefix"/versions/*; do
        name=${folder##*/}
        [ "$name" != "$(current)" ] || continue
        [ "versions/$name" != "$(readlink "$prefix/previous" 2>/dev/null)" ] || continue
        [ -z "$(users_of "$folder")" ] || continue
        rm -rf "$folder"
    done
}

# The files outside of the prefix as this version has them.
bring_files() {
    from=$prefix/versions/$1/files
    [ -d "$from" ] || return 0
    if ! bundled; then
        install -m 644 "$from/nodeagent.service" "$from/nodeagent.slice" -t "$packaged_units"
        return
    fi
    install -D -m 644 "$from/nodeagent.service" "$from/nodeagent.slice" -t "$units"
    install -D -m 644 "$from/nodeagent.sysusers.conf" "$sysusers/nodeagent.conf"
    install -D -m 644 "$from/nodeagent.tmpfiles.conf" "$tmpfiles/nodeagent.conf"
    install -D -m 644 "$from/nodeagent.needrestart.conf" "$needrestart/nodeagent.conf"
    for page in "$from"/man/*; do
        install -D -m 644 "$page" "$man/man${page##*.}/${page##*/}"
    done
    install -D -m 644 "$from/completion/bash" "$bash_completion"
    install -D -m 644 "$from/completion/zsh" "$zsh_completion"
}
# After a power cut a unit that was just written would be empty, and no agent would start.
files_to_disk() {
    if bundled; then
        sync "$units/nodeagent.service" "$units/nodeagent.slice" "$units" "$sysusers/nodeagent.conf" "$sysusers" \
            "$tmpfiles/nodeagent.conf" "$tmpfiles"
    else
        sync "$packaged_units/nodeagent.service" "$packaged_units/nodeagent.slice" "$packaged_units"
    fi
}
link_programs() {
    mkdir -p "$programs"
    for program in nodeagent nodeagentctl nodeagent-run; do
        ln -sfn "$prefix/bin/$program" "$programs/$program"
    done
}
remove_files() {
    rm -f "$units/nodeagent.service" "$units/nodeagent.slice" "$sysusers/nodeagent.conf" "$tmpfiles/nodeagent.conf" \
        "$needrestart/nodeagent.conf" "$bash_completion" "$zsh_completion" "$man"/man1/nodeagent*.1 \
        "$programs/nodeagentctl" "$programs/nodeagent-run" "$programs/nodeagent" # by which `bundled` knows
    [ ! -d "$needrestart" ] || rmdir -p --ignore-fail-on-non-empty "$needrestart"
}

# A bundle's files come before the package's: systemd reads /etc/systemd first. Without the bundle's link they are an
# administrator's own.
leave_bundle() {
    bundled || return 0
    remove_files
    ! booted || systemctl daemon-reload
    [ ! -L "$units/multi-user.target.wants/nodeagent.service" ] || systemctl reenable --quiet nodeagent
    say "a bundle was installed here: its files in /etc and /usr/local are removed, the package's take their place" \
        "(those of its unit from the agent's next start)"
}

name_version() {
    wheel=$(ls "$here"/wheels/nodeagent-*.whl 2>/dev/null) ||
        die 1 "$here/wheels holds no nodeagent: unpack the bundle again"
    version=$(basename "$wheel" | cut -d- -f2)-$(cat "$here"/wheels/*.whl | sha256sum | cut -c1-8)
}

to_disk() {
    sync -f "$1" ||
        die 1 "$version could not be written to the disk (above); nothing has been switched. Mend that, then: $(again)"
}

do_status() {
    name_version
    if [ "$(current)" = "$version" ]; then
        runs=
        ! booted || runs=$(running)
        if [ "${runs:-$version}" = "$version" ]; then
            say "$version is in use"
        else
            say "$version is in use, but the agent still runs $runs: systemctl restart nodeagent"
        fi
    else
        was=$(current)
        say "$version is not in use, ${was:-nothing} is"
        exit 3
    fi
}

do_install() {
    name_version
    folder=$prefix/versions/$version
    # What dpkg has just unpacked is the next version's.
    [ "$files" = yes ] || bring_files "$(current)"
    python=$(find_python)
    # First of all, so that whatever an install that stops halfway has left can be removed.
    [ -e "$prefix/setup" ] || install -D -m 755 "$here/setup.sh" "$prefix/setup"
    if [ ! -e "$folder/.complete" ]; then
        rm -rf "$folder"
        mkdir -p "$folder"
        # pip comes as a wheel too: Debian's python3 alone has neither pip nor ensurepip.
        "$python" -m venv --without-pip "$folder"
        "$folder/bin/python" "$(ls "$here"/wheels/pip-*.whl)/pip" install --quiet --disable-pip-version-check \
            --no-index --find-links "$here/wheels" --no-cache-dir nodeagent ||
            die 1 "pip could not install the wheels (above); nothing has been switched. Mend that, then: $(again)"
        "$folder/bin/nodeagent" --version >/dev/null ||
            die 1 "$version does not run here (above); nothing has been switched. Mend that, then: $(again)"
        # After a power cut a mark without its files would never be installed again; and files without their mark
        # would be removed under the agent that runs from them.
        to_disk "$folder"
        : >"$folder/.complete"
        to_disk "$folder"
    fi
    rm -rf "$folder/files"
    mkdir "$folder/files"
    cp -R "$here"/nodeagent.* "$here/man" "$here/completion" "$folder/files"
    if [ -e "$etc/nodeagent.yaml" ]; then
        "$folder/bin/nodeagent" check-config "$etc/nodeagent.yaml" >/dev/null ||
            die 1 "$version does not take $etc/nodeagent.yaml (above); nothing has been switched. Mend the file," \
                "then: $(again)"
    fi
    if [ "$files" = yes ]; then link_programs; else leave_bundle; fi
    mkdir -p -m 755 "$etc"
    [ -e "$etc/nodeagent.yaml" ] || install -m 600 "$here/nodeagent.yaml" "$etc/nodeagent.yaml"
    install -m 755 "$here/setup.sh" "$prefix/setup"
    switch_to "$version"
    if [ "$was" = "$version" ]; then
        say "$version is installed already"
    else
        say "$version is installed${was:+, $was before}"
    fi
    restart
    prune
}

do_rollback() {
    to=$(readlink "$prefix/previous" 2>/dev/null | sed 's|^versions/||') || true
    [ -n "$to" ] && [ -e "$prefix/versions/$to/.complete" ] || die 6 "there is no version before to go back to"
    [ ! -e "$etc/nodeagent.yaml" ] || "$prefix/versions/$to/bin/nodeagent" check-config "$etc/nodeagent.yaml" >/dev/null ||
        die 1 "$to does not take $etc/nodeagent.yaml (above); nothing has been switched. Mend the file, then: $(again)"
    switch_to "$to"
    say "back to $to, $was before"
    restart
}

do_remove() {
    if [ -n "$(shims)" ] && [ "$drain" = no ]; then
        die 6 "$(shims | wc -l) pods live here. Let them leave first: nodeagentctl drain NODE --reason TEXT; or have" \
            "it done: $prefix/setup $verb --drain"
    fi
    agents=$(strays | tr '\n' ' ')
    [ -z "$agents" ] || die 6 "another agent than that of nodeagent.service runs here, process ${agents% }; nothing" \
        "has been removed. Let its jobs leave (nodeagentctl drain NODE --reason TEXT), end it (kill -INT" \
        "${agents% }), then do this again"
    if booted && [ -e "$prefix/bin" ]; then
        systemctl disable --quiet nodeagent 2>/dev/null || true
        systemctl stop nodeagent 2>/dev/null || true
    fi
    while [ -n "$(shims)" ]; do
        [ "$patience" -gt 0 ] || die 6 "$(shims | wc -l) pods still live here; nothing has been removed, but no agent" \
            "runs. Do this again when they have ended; or have the agent back: systemctl enable --now nodeagent"
        patience=$((patience - 1))
        sleep 1
    done
    others=$(every_shim | wc -l)
    if bundled; then
        remove_files
        ! booted || systemctl daemon-reload
    fi
    rm -rf "$prefix/versions" "$prefix" # this script after what takes long
    say "removed"
    [ "$others" -eq 0 ] ||
        say "$others pods of people's own (nodeagentctl local, run --local) ran from its files, and may fail"
}

do_purge() {
    do_remove
    # With all that is mounted in it; nothing is mounted there where no agent has run.
    while umount -l "$run/pods" 2>/dev/null; do :; done
    gone='' left='' mounts=$(cut -d' ' -f5 /proc/self/mountinfo)
    for folder in "$etc" "$state" "$logs" "$run"; do
        if printf '%s\n' "$mounts" | grep "^$folder/" >&2; then
            left="$left $folder"
        else
            rm -rf "$folder"
            gone="$gone${gone:+, }$folder"
        fi
    done
    say "removed, too: $gone (other folders that its config named stay)"
    [ -z "$left" ] || die 1 "something is mounted in$left (above), so that is left: it would be emptied. Detach it" \
        "(umount -l), then: rm -rf$left"
}

[ $# -ge 1 ] || usage
verb=$1
shift
drain=no restart=yes
for option in "$@"; do
    case $verb:$option in
    remove:--drain | purge:--drain) drain=yes ;;
    install:--no-restart | rollback:--no-restart) restart=no ;;
    *) usage ;;
    esac
done
case $verb in install | status | rollback | remove | purge) ;; *) usage ;; esac
[ "$(id -u)" -eq 0 ] || die 1 "only root can do this"
[ "$verb" = status ] || alone
"do_$verb"
