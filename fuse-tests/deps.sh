#!/bin/sh
# Installs what the tests use and is not there yet: Debian packages (root only), pjdfstest and fsx
# into the directory $1, two users for pjdfstest. Says in one line what could not be had; the
# tests that need it then fail or are skipped by name.
# WITH_ZFS=1 adds what `make raidz` needs.
set -u
tools=$1
cargo=${CARGO:-cargo}
say() { echo "deps: $*" >&2; }

# command:package, one for each command a test runs
wanted="fusermount3:fuse3 setfacl:acl setfattr:attr mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs
mksquashfs:squashfs-tools mkfs.ext4:e2fsprogs bindfs:bindfs fio:fio
qemu-img:qemu-utils fuse-overlayfs:fuse-overlayfs losetup:mount setpriv:util-linux
useradd:passwd findmnt:util-linux fsfreeze:util-linux sqlite3:sqlite3 setcap:libcap2-bin"
[ "${WITH_ZFS:-}" = 1 ] && wanted="$wanted zfs-fuse:zfs-fuse zpool:zfs-fuse"

PATH=$PATH:/usr/sbin:/sbin
missing=
for pair in $wanted; do
    command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
done
[ -e /usr/include/sys/acl.h ] || missing="$missing libacl1-dev"
[ -e /usr/include/fcntl.h ] || missing="$missing libc6-dev"

if [ -n "$missing" ]; then
    missing=$(echo "$missing" | tr ' ' '\n' | sort -u | tr '\n' ' ')
    if [ "$(id -u)" != 0 ]; then
        say "not installed, and only root can: apt-get install $missing"
    elif ! command -v apt-get >/dev/null; then
        say "not installed, and there is no apt-get here: $missing(names of Debian's packages)"
    else
        say "apt-get install $missing"
        export DEBIAN_FRONTEND=noninteractive
        mkdir -p "$tools"
        log=$tools/apt.log
        { apt-get -q update && apt-get -q install -y --no-install-recommends $missing; } \
            </dev/null >"$log" 2>&1 || { tail -n 5 "$log" >&2; say "apt-get failed: see $log"; }
    fi
fi

# Built once into $tools; a copy of the same version in PATH serves as well.
crate() {
    name=$1 version=$2
    for found in "$tools/bin/$name" "$(command -v "$name")"; do
        [ -x "$found" ] || continue
        case $("$found" --version 2>/dev/null) in
        *" $version") mkdir -p "$tools/bin"
            [ "$found" = "$tools/bin/$name" ] || ln -sf "$found" "$tools/bin/$name"
            return ;;
        esac
    done
    say "cargo install $name $version (once, about a minute)"
    mkdir -p "$tools"
    if "$cargo" install -q "$name" --version "$version" --locked --root "$tools" \
        --target-dir "$tools/build" </dev/null >"$tools/$name.log" 2>&1; then
        rm -rf "$tools/build"
    else
        tail -n 5 "$tools/$name.log" >&2
        say "cargo install $name failed: see $tools/$name.log"
    fi
}
crate pjdfstest 0.2.2
crate fsx 0.3.2

# pjdfstest wants two users whose primary group has the user's name.
for user in pjdfstest tests; do
    getent passwd "$user" >/dev/null && continue
    if [ "$(id -u)" = 0 ]; then
        useradd --system --user-group --no-create-home --shell /usr/sbin/nologin "$user" ||
            say "the user $user could not be made: pjdfstest will not run"
    else
        say "the user $user is missing (useradd --system --user-group $user): no pjdfstest"
    fi
done
exit 0
