//! Texts of `--help` and of the manual page (layer 9). Constant.

/// The first paragraph.
pub const ABOUT: &str = "\
bcachefs-fuse mounts a directory of disk and boot images so that every read goes through one
block cache, each block tagged with the image it came from. It is not the on-disk filesystem
called bcachefs.";

/// Behind `bcachefs-fuse --help`.
pub const MAIN: &str = "\
Examples:
  bcachefs-fuse mount /srv/images /mnt/images
  bcachefs-fuse stat /mnt/images
  bcachefs-fuse umount /mnt/images

Exit codes: 0 well, 1 it failed, 2 the command line is wrong, 32 failed as mount(8) helper.
The manual page is bcachefs-fuse(1).";

/// Behind `mount --help`.
pub const MOUNT: &str = "\
In option names - and _ are the same. Sizes are typed 4096, 64K, 64M, 1G; times 500ms, 30s, 2m.

Examples:
  bcachefs-fuse mount /srv/images /mnt/images
  bcachefs-fuse mount /srv/images /srv/images        over itself: nobody writes behind the mount
  bcachefs-fuse mount --cache 1G --ro /srv/images /mnt/images
  bcachefs-fuse mount --state /nvme/bcfs /srv/images /mnt/images
  bcachefs-fuse mount --upper ~/try1 /srv/golden /mnt/img    golden is never touched
  bcachefs-fuse mount -f -o cache=1G,cache_mode=writearound /srv/images /mnt/images
  mount -t fuse.bcachefs-fuse -o cache=1G /srv/images /mnt/images

In /etc/fstab:
  /srv/images  /mnt/images  fuse.bcachefs-fuse  cache=1G,nofail  0 0";

/// Behind `flush --help`.
pub const FLUSH: &str = "\
Shows how far it is on a terminal. The last line has bytes, seconds and the most writes in flight.
Ctrl-C ends the waiting; the daemon writes on at its own rate.

Exit codes: 0 all is home, 1 not all of it; one line on standard error says which image and why.

Examples:
  bcachefs-fuse flush /mnt/images
  bcachefs-fuse flush /mnt/images/debian.img /mnt/images/bsd.img";

/// Behind `umount --help`.
pub const UMOUNT: &str = "\
Refuses first if the mount is in use, and names who uses it. Then everything is written home; Ctrl-C
leaves the rest in the journal and unmounts. Without a word and with exit code 0 the files of SOURCE
are current.

Exit codes: 0 unmounted (with -n: perhaps with data left, which it says), 1 still mounted, or
unmounted with data left in the journal; one line on standard error says which.

Examples:
  bcachefs-fuse umount /mnt/images
  bcachefs-fuse umount -n /mnt/images                leave what is dirty in the journal
  bcachefs-fuse umount --lazy /mnt/images
  umount /mnt/images                                 the same through mount(8)'s helper";

/// Behind `stat --help`.
pub const STAT: &str = "\
Examples:
  bcachefs-fuse stat /mnt/images                     every device, busiest first
  bcachefs-fuse stat /mnt/images/debian.img          this device only
  bcachefs-fuse stat --watch 2 /mnt/images           rates, every two seconds
  bcachefs-fuse stat --json /mnt/images
  bcachefs-fuse stat --check --max-age 1h /mnt/images || mail -s 'image cache' root
  bcachefs-fuse stat --prometheus /mnt/images > /var/lib/node_exporter/images.prom";

/// Behind `set --help`.
pub const SET: &str = "\
Changes all that is named, or nothing. Live options: bypass, sequential_cutoff, expire, readahead,
cache_mode, journal_delay, writeback_percent, writeback_delay, writeback_running.

Examples:
  bcachefs-fuse set /mnt/images
  bcachefs-fuse set /mnt/images expire=30s
  bcachefs-fuse set /mnt/images cache-mode=writearound sequential-cutoff=128M
  bcachefs-fuse set /mnt/images writeback_percent=20 writeback_running=no";

/// Behind `diff --help`.
pub const DIFF: &str = "\
Everything dirty is written to the upper first. Bytes are what the upper holds of a file, in whole
blocks. What a deleted directory had in it is not listed.

Examples:
  bcachefs-fuse diff /mnt/img
  bcachefs-fuse diff --blocks /mnt/img
  bcachefs-fuse diff --json /mnt/img | jq '.differences[].path'";

/// Behind `revert --help`.
pub const REVERT: &str = "\
Asks on a terminal; elsewhere it needs --yes. Nothing of the changes is kept. Refused while a file
of the mount is open, unless --force.

Examples:
  bcachefs-fuse revert /mnt/img
  bcachefs-fuse revert --yes /mnt/img";

/// Behind `list --help`.
pub const LIST: &str = "\
Examples:
  bcachefs-fuse list
  bcachefs-fuse list --json";

/// Behind `trace --help`.
pub const TRACE: &str = "\
One line a read request: unit, first block, blocks.

Examples:
  bcachefs-fuse trace /mnt/images boot.trace 60
  bcachefs-fuse trace /mnt/images boot.trace         until Ctrl-C";

/// Behind `check --help`.
pub const CHECK: &str = "\
Takes the locks of a mount and writes nothing. Prints the journal's size, uuid and generation, the
images that have data in it, where it is corrupt, and whether the owner mark in SOURCE names it.

Exit codes: 0 clean, 1 there is data in the journal, 4 it cannot be used as it is, 8 not looked at.

Examples:
  bcachefs-fuse check /srv/images
  bcachefs-fuse check --json /nvme/bcfs";

/// Behind `journal --help`.
pub const JOURNAL: &str = "\
Each takes the locks of a mount first, and is refused while one uses the journal.

Examples:
  bcachefs-fuse journal dump /srv/images
  bcachefs-fuse journal replay /srv/images
  bcachefs-fuse journal abandon /srv/images";

/// Behind `journal dump --help`.
pub const DUMP: &str = "\
Exit codes: 0 it was printed, 1 there is no journal that can be read.

Examples:
  bcachefs-fuse journal dump /srv/images
  bcachefs-fuse journal dump --json --records /nvme/bcfs";

/// Behind `journal replay --help`.
pub const REPLAY: &str = "\
Of a corrupt journal what lies before the bad record is written home. With --skip the records of
FILE are given up, and the file is left as it is. In both cases the journal as it was is copied
first, to journal.skipped.N beside it (of a partition: in SOURCE/.bcachefs-fuse).

Exit codes: 0 all is home, 1 not all of it; one line on standard error says what and why.

Examples:
  bcachefs-fuse journal replay /srv/images
  bcachefs-fuse journal replay --skip old/debian.img /srv/images";

/// Behind `journal abandon --help`.
pub const ABANDON: &str = "\
Lists what is lost and asks; without a terminal it needs --yes. The journal becomes
journal.abandoned.N in its directory; nothing is deleted.

Exit codes: 0 it was given up, 1 nothing was changed.

Examples:
  bcachefs-fuse journal abandon /srv/images
  bcachefs-fuse journal abandon --yes /nvme/bcfs";

/// Behind `doctor --help`.
pub const DOCTOR: &str = "\
Examples:
  bcachefs-fuse doctor
  bcachefs-fuse doctor /srv/images";

/// Behind `completions --help`.
pub const COMPLETIONS: &str = "\
Examples:
  bcachefs-fuse completions bash > /etc/bash_completion.d/bcachefs-fuse
  bcachefs-fuse completions zsh > /usr/share/zsh/site-functions/_bcachefs-fuse";

/// Behind the option list of the manual page.
pub const STANDARD_WORDS: &str = "\
Behind -o the words of mount(8) are understood too: defaults, rw, ro, [no]suid, [no]dev, [no]exec,
[no]atime, relatime, strictatime, lazytime, [no]diratime, sync, async, dirsync, auto, noauto, user,
nouser, users, owner, group, nofail, _netdev, comment=, context=, x-*, X-*, remount, and what the
kernel prints for a FUSE mount. Any other word is an error.";

/// FILES of the manual page, in roff.
pub const MAN_FILES: &str = r"
.TP
.I /run/bcachefs\-fuse/MAJ\-MIN.sock
The control socket of root's mounts, named after the mount's device number.
.TP
.I $XDG_RUNTIME_DIR/bcachefs\-fuse/, /tmp/bcachefs\-fuse\-UID/
The same for other users; the second where there is no $XDG_RUNTIME_DIR, and with allow_other.
.TP
.I /sbin/mount.fuse.bcachefs\-fuse, /sbin/umount.fuse.bcachefs\-fuse
The helpers of
.BR mount (8).
.TP
.I SOURCE/.bcachefs\-fuse/journal, STATE/journal
The writeback journal.
.TP
.I SOURCE/.bcachefs\-fuse/owner
The owner mark: there while the files of SOURCE are not current without the journal it names.
.TP
.I /etc/fuse.conf
user_allow_other there lets users other than root say allow_other.
.PP
.B stat
and
.B list
answer whoever may enter the mount: with allow_other everybody, else the user who mounted it, and
root. They name every file that was read.
.BR set ,
.B trace
and
.B umount
are for the user who mounted it and for root.";

/// EXIT STATUS of the manual page, in roff.
pub const MAN_EXIT: &str = r"
.TP
.B 0
Well.
.TP
.B 1
It failed; one line on standard error says what, where, and what to do. Of
.BR check :
there is data in the journal.
.TP
.B 2
The command line is wrong.
.TP
.B 4, 8
Of
.BR check :
the journal cannot be used as it is; it could not be looked at.
.TP
.B 32
It failed as a helper of
.BR mount (8).";

/// ENVIRONMENT of the manual page, in roff.
pub const MAN_ENVIRONMENT: &str = r"
.TP
.B XDG_RUNTIME_DIR
Where the control sockets of an ordinary user lie.
.TP
.B RUST_LOG
What \fBmount \-f\fR logs: error, warn, info, debug, trace.
.TP
.B NOTIFY_SOCKET
\fBmount \-f\fR tells systemd when it is mounted.";

/// EXAMPLES of the manual page, in roff.
pub const MAN_EXAMPLES: &str = r"
.nf
bcachefs\-fuse mount /srv/images /mnt/images
bcachefs\-fuse stat \-\-watch 2 /mnt/images
bcachefs\-fuse set /mnt/images cache_mode=writearound
bcachefs\-fuse umount /mnt/images
.fi
.PP
A line of
.IR /etc/fstab :
.PP
.nf
/srv/images  /mnt/images  fuse.bcachefs\-fuse  cache=1G,nofail  0 0
.fi";

/// SEE ALSO of the manual page, in roff.
pub const MAN_SEE_ALSO: &str = r"
.BR mount (8),
.BR fusermount3 (1),
.BR fstab (5),
.BR findmnt (8)";
