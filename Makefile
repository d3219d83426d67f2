# bcachefs-fuse. `make help` lists what there is; the two to begin with are `make demo` and
# `make test`.

PREFIX  ?= /usr/local
DESTDIR ?=
CARGO   ?= cargo
TARGET  := $(or $(CARGO_TARGET_DIR),target)
BIN     := $(TARGET)/release/bcachefs-fuse
TOOLS   := $(TARGET)/tools
BINDIR  := $(DESTDIR)$(PREFIX)/bin
SHARE   := $(DESTDIR)$(PREFIX)/share
# The only place where mount(8) and umount(8) look for helpers, whatever PREFIX says.
SBIN    := $(DESTDIR)/sbin
HELPERS := mount.fuse.bcachefs-fuse umount.fuse.bcachefs-fuse
EXAMPLE := $(SHARE)/doc/bcachefs-fuse

.DEFAULT_GOAL := help
.PHONY: help build release check fmt test deps demo bench raidz fsx crash crash-seeds full \
        install uninstall clean need-cargo

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

need-cargo:
	@command -v $(CARGO) >/dev/null || { echo "cargo is missing: install Rust 1.88 or newer\
	 (rustup, or your distribution's package), then run make again" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "cc is missing: install a C linker\
	 (Debian: apt-get install gcc libc6-dev), then run make again" >&2; exit 1; }

build: need-cargo ## the debug build
	$(CARGO) build --workspace --all-targets

release: need-cargo ## the binary to install: target/release/bcachefs-fuse
	$(CARGO) build --release

check: need-cargo ## formatting, lints, documentation, the rules of the sources
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items
	RUST_BACKTRACE=0 $(CARGO) test -q -p fuse-tests --test tidy

fmt: need-cargo ## format the sources
	$(CARGO) fmt --all

deps: need-cargo ## what the tests need: packages (as root), pjdfstest, fsx, two users
	@CARGO="$(CARGO)" fuse-tests/deps.sh "$(TOOLS)"

test: deps ## all tests, mount tests and external suites too
	@$(CARGO) run -q -p fuse-tests --bin run_tests -- --tools "$(TOOLS)"

fsx: deps ## fsx with 100,000 operations
	@FUSE_TESTS_FSX=100000 $(CARGO) run -q -p fuse-tests --bin run_tests -- \
	    --tools "$(TOOLS)" --only posix --filter fsx

crash-seeds: need-cargo ## power cuts of the store in memory, 2,000 workloads of each kind
	@CRASH_SEEDS=2000 $(CARGO) test --release -p bcachefs-fuse --lib store::crash -- --nocapture

crash: deps ## kill -9 under a storm of writes, 1,000 rounds
	@FUSE_TESTS_CRASH=1000 FUSE_TESTS_FILE_SECONDS=14400 \
	    $(CARGO) run -q -p fuse-tests --bin run_tests -- --tools "$(TOOLS)" --only crash

full: deps ## every test at its full size (200,000 files, 100,000 directories, ...)
	@FUSE_TESTS_FULL=1 FUSE_TESTS_FSX=100000 \
	    $(CARGO) run -q -p fuse-tests --bin run_tests -- --tools "$(TOOLS)"

demo: release ## what it does, in half a minute, on small images
	@BCACHEFS_FUSE="$(abspath $(BIN))" fuse-tests/demo.sh

bench: release ## the speed table: ratios to the source, bindfs and an empty FUSE daemon
	@FUSE_TESTS_TOOLS="$(TOOLS)" $(CARGO) run -q --release -p fuse-tests --bin bench

raidz: release ## two raidz pools on our mount (needs zfs-fuse; as root)
	@WITH_ZFS=1 CARGO="$(CARGO)" fuse-tests/deps.sh "$(TOOLS)"
	@$(CARGO) run -q --release -p fuse-tests --bin raidz

# Installs what `make release` built; builds it if it is missing, so that
# `make release && sudo make install` needs no cargo for root.
install: ## binary, mount helpers, man page, completions, unit example (PREFIX, DESTDIR)
	@test -x $(BIN) || $(MAKE) --no-print-directory release
	install -Dm755 $(BIN) $(BINDIR)/bcachefs-fuse
	install -d $(SBIN)
	for name in $(HELPERS); do ln -sfn $(PREFIX)/bin/bcachefs-fuse $(SBIN)/$$name; done
	install -d $(SHARE)/man/man1 $(SHARE)/bash-completion/completions \
	    $(SHARE)/zsh/site-functions $(SHARE)/fish/vendor_completions.d
	$(BIN) man > $(SHARE)/man/man1/bcachefs-fuse.1
	$(BIN) completions bash > $(SHARE)/bash-completion/completions/bcachefs-fuse
	$(BIN) completions zsh > $(SHARE)/zsh/site-functions/_bcachefs-fuse
	$(BIN) completions fish > $(SHARE)/fish/vendor_completions.d/bcachefs-fuse.fish
	install -d $(EXAMPLE)
	install -m644 packaging/* README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE $(EXAMPLE)

uninstall: ## removes what install put there
	rm -f $(BINDIR)/bcachefs-fuse $(addprefix $(SBIN)/,$(HELPERS))
	rm -f $(SHARE)/man/man1/bcachefs-fuse.1
	rm -f $(SHARE)/bash-completion/completions/bcachefs-fuse
	rm -f $(SHARE)/zsh/site-functions/_bcachefs-fuse
	rm -f $(SHARE)/fish/vendor_completions.d/bcachefs-fuse.fish
	rm -rf $(EXAMPLE)

clean: need-cargo ## removes target/
	$(CARGO) clean
