#!/bin/sh
# make demo: what the cache and the journal are for, in a few seconds, on small images. Ordinary
# user or root; everything happens in one directory below target/, which is gone at the end.
# Environment: BCACHEFS_FUSE (the binary), CARGO, CARGO_TARGET_DIR.
set -u
cd "$(dirname "$0")/.." || exit 1
PATH=$PATH:/usr/sbin:/sbin
target=${CARGO_TARGET_DIR:-target}
bin=${BCACHEFS_FUSE:-$target/release/bcachefs-fuse}
size=16777216

[ -x "$bin" ] || { echo "demo: $bin is not built: run make demo" >&2; exit 1; }
command -v mkfs.ext4 >/dev/null || { echo "demo: mkfs.ext4 is missing (e2fsprogs)" >&2; exit 1; }
[ -r /dev/fuse ] && [ -w /dev/fuse ] ||
    { echo "demo: no access to /dev/fuse: run bcachefs-fuse doctor" >&2; exit 1; }
${CARGO:-cargo} build -q --release -p fuse-tests --bin interleave --bin acked || exit 1
bin=$(realpath "$bin")
reader=$(realpath "$target/release/interleave")
acked=$(realpath "$target/release/acked")
export BCACHEFS_FUSE="$bin"

dir=$(mktemp -d "$(realpath "$target")/demo.XXXXXX") || exit 1
src=$dir/images mnt=$dir/mnt
failed=0
began=$(date +%s)

mounted() { grep -qF " $mnt " /proc/self/mountinfo; }

# Every way out ends here: the mount first, then the directory.
clean() {
    trap - EXIT
    mounted && "$bin" umount "$mnt" >/dev/null 2>&1
    mounted && { fusermount3 -uz "$mnt" 2>/dev/null || umount -l "$mnt"; }
    rm -rf "$dir"
}
trap clean EXIT
trap 'exit 130' INT TERM HUP

# The command as one would type it; the paths are those of this run, shortened.
typed() { printf '\n$ %s\n' "$*"; }
# verdict CONDITION MEASURED
verdict() {
    if [ "$1" = 0 ]; then word=ok; else word=FAILED failed=1; fi
    printf '  %s: %s\n' "$2" "$word"
}
field() { printf '%s\n' "$2" | sed -n "s/.*$1=\([0-9]*\).*/\1/p"; }
# The last number of that name in JSON: of the whole mount, where each image has one, too.
number() {
    printf '%s\n' "$2" | tr ',{' '\n\n' | sed -n "s/^\"$1\":\([0-9]*\).*/\1/p" | tail -n 1
}
# Whether a process ends within two seconds.
gone() {
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        # A zombie is one that its parent has not noticed yet.
        grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status" || return 0
        sleep 0.1
    done
    return 1
}

start() { # OPTIONS, "" for none
    typed "bcachefs-fuse mount ${1:+-o $1 }images mnt"
    if [ -n "$1" ]; then "$bin" mount -o "$1" "$src" "$mnt"; else "$bin" mount "$src" "$mnt"; fi
    code=$?
    [ $code = 0 ] && mounted
    ok=$?
    verdict $ok "$(find "$mnt" -name '*.img' -size +0 | wc -l) images in mnt"
    [ $ok = 0 ] || exit 1
}
stop() {
    typed "bcachefs-fuse umount mnt"
    before=$(date +%s%N)
    "$bin" umount "$mnt"
    code=$?
    ms=$((($(date +%s%N) - before) / 1000000))
    ! mounted && [ $code = 0 ]
    verdict $? "unmounted in $ms ms"
}
# Reads twice; sets $first and $second.
twice() {
    typed "for n in 1 2; do read 4 KiB of a.img, of b.img, of c.img, of a.img, ...; done"
    first=$("$reader" "$mnt" $size a.img b.img c.img) || exit 1
    second=$("$reader" "$mnt" $size a.img b.img c.img) || exit 1
}

echo "Three disks of a raidz are read in turn. The first act shows what FreeBSD's loader made of"
echo "that before 2011, when its cache was emptied each time another disk was read."

mkdir -p "$src" "$mnt" "$dir/tree"
head -c 18874368 /dev/urandom >"$dir/tree/kernel"
typed "for i in a b c; do mkfs.ext4 -d tree images/\$i.img 64M; done"
ok=0
for i in a b c; do
    truncate -s 64M "$src/$i.img" && mkfs.ext4 -q -F -d "$dir/tree" "$src/$i.img" || ok=1
done
verdict $ok "$(du -sm "$src" | cut -f1) MiB on disk"

start unit_flush,readahead=0
twice
[ "$(field hits "$second")" = 0 ]
verdict $? "second round: $(field hits "$second") hits, $(field disk "$second") blocks from disk"
slow=$(field ms "$second")
stop

start ""
twice
[ "$(field disk "$second")" = 0 ] && [ "$(field hits "$second")" = "$(field requests "$second")" ]
verdict $? "second round: $(field hits "$second") hits, $(field disk "$second") blocks from disk"
echo "  $(field ms "$second") ms instead of $slow ms"
typed "bcachefs-fuse stat mnt"
said=$("$bin" stat "$mnt" | grep -E 'ops.*bypasses.*hits.*misses' | tail -n 1)
[ -n "$said" ]
verdict $? "$said"
stop

echo
echo "Writes are acknowledged from a journal and reach the images later. Here nothing goes home"
echo "before flush (writeback_running=no), so that the killed daemon leaves all in the journal."

writes=2000
typed "truncate -s 64M images/disk.img"
truncate -s 64M "$src/disk.img" && cp --sparse=always "$src/disk.img" "$dir/expected.img" || exit 1
start cache_mode=writeback,writeback_running=no
typed "write $writes blocks of 4 KiB, all over mnt/disk.img, one after the other"
"$acked" write "$dir/expected.img" $writes >/dev/null || exit 1
said=$("$acked" write "$mnt/disk.img" $writes) || exit 1
json=$("$bin" stat --json "$mnt") || exit 1
dirty=$(number dirty_bytes "$json")
pid=$(number pid "$json")
home=$(field there "$("$acked" check "$src/disk.img" $writes)")
[ "$(field acked "$said")" = $writes ] && [ "${dirty:-0}" -gt 0 ] && [ "$home" -lt $writes ]
verdict $? "$writes acked in $(field ms "$said") ms, $(field fsyncs "$said") fsyncs"
echo "  $((${dirty:-0} / 1024)) KiB dirty; images/disk.img itself has $home of them"

typed "kill -KILL $pid   # the daemon"
kill -KILL "$pid" && gone "$pid" && ! "$acked" check "$mnt/disk.img" 1 >/dev/null 2>&1
verdict $? "the daemon is dead, mnt answers errors"

start cache_mode=writeback,writeback_running=no
typed "read them back"
said=$("$acked" check "$mnt/disk.img" $writes) || exit 1
[ "$(field there "$said")" = $writes ]
verdict $? "$(field there "$said") there, $(field lost "$said") lost"
typed "bcachefs-fuse flush mnt"
said=$("$bin" flush "$mnt")
code=$?
[ $code = 0 ] && [ "$(number dirty_bytes "$("$bin" stat --json "$mnt")")" = 0 ]
verdict $? "${said##*: }"
typed "sha256sum images/disk.img   # and of the same writes to a plain file"
sum=$(sha256sum <"$src/disk.img")
expected=$(sha256sum <"$dir/expected.img")
[ "$sum" = "$expected" ]
verdict $? "$(echo "$sum" | cut -c 1-16)..., expected $(echo "$expected" | cut -c 1-16)..."
stop

# An overlay over an image of 8 GiB: one block is written, and taken back.
golden=$dir/golden upper=$dir/upper
mkdir "$golden" && truncate -s 8G "$golden/server.img" || exit 1
typed "bcachefs-fuse mount --upper upper golden mnt   # golden has an image of 8 GiB"
"$bin" mount --upper "$upper" "$golden" "$mnt" && mounted
verdict $? "golden on mnt, changes go into upper"
typed "dd of=mnt/server.img bs=4k count=1 seek=1M conv=notrunc,fsync"
before=$(date +%s%N)
head -c 4096 /dev/urandom |
    dd of="$mnt/server.img" bs=4k count=1 seek=1M conv=notrunc,fsync status=none
code=$?
ms=$((($(date +%s%N) - before) / 1000000))
said=$("$bin" diff "$mnt")
held=$(($(du -s --block-size=1 "$upper/data" | cut -f 1) - $(stat -c '%b * %B' "$upper/data")))
[ $code = 0 ] && [ "$said" = "M server.img  4K" ] && [ "$held" -le 65536 ]
verdict $? "$ms ms, $held bytes in upper/data; diff says: $said"
typed "bcachefs-fuse revert --yes mnt"
for _ in 1 2 3 4 5; do
    said=$("$bin" revert --yes "$mnt" 2>&1) && break
    sleep 0.2
done
[ -z "$("$bin" diff "$mnt")" ] &&
    cmp -s -n 8192 -i 4294967296 "$mnt/server.img" "$golden/server.img"
verdict $? "${said##*: }; golden again"
stop

typed "e2fsck -fn images/a.img   # and b, c"
ok=0
for i in a b c; do
    e2fsck -fn "$src/$i.img" >/dev/null 2>&1 || ok=1
done
verdict $ok "3 images checked"

typed "findmnt; losetup -a; pgrep -f mnt   # what is left of it"
mounts=$(grep -cF "$dir" /proc/self/mountinfo)
loops=$(cat /sys/block/loop*/loop/backing_file 2>/dev/null | grep -cF "$dir")
# A daemon that is ending may live for a moment longer than its mount.
for _ in 1 2 3 4 5 6 7 8 9 10; do
    processes=$(grep -ls "demo[.]${dir##*demo.}" /proc/[0-9]*/cmdline | wc -l)
    [ "$processes" = 0 ] && break
    sleep 0.1
done
[ "$mounts$loops$processes" = 000 ]
verdict $? "$mounts mounts, $loops loop devices, $processes processes"

clean
seconds=$(($(date +%s) - began))
echo
[ ! -e "$dir" ] && [ $seconds -le 60 ]
verdict $? "$seconds s in all, nothing left"

cat <<END

For images of your own:
  $bin mount /srv/images /mnt/images
  $bin stat /mnt/images
  $bin umount /mnt/images
END
exit $failed
