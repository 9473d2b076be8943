# All targets need Go, git and make; test-all and test-browser also need a C compiler for the race detector.
SHELL := /bin/bash
BIN := bin
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# What needs no cgo is compiled without it and with the flags of a release, as the control plane is: the build cache then has each
# package once. Compilers collect garbage less often.
PURE := CGO_ENABLED=0 GOFLAGS=-trimpath GOGC=400
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.9.0

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the static, stripped program into bin/
	$(PURE) go build -tags grpcnotrace -ldflags '-s -w -X main.version=$(VERSION)' -o $(BIN)/storage-controller ./cmd/storage-controller

.PHONY: demo
demo: ## Run the demo on a simulated cluster, with REAL=1 on a real control plane; STAY=1 keeps it running
	@set -o pipefail; $(PURE) go build -v -tags grpcnotrace -o $(BIN)/demo.d/ ./test/demo ./test/hostdriver ./cmd/storage-controller 2>&1 | \
		awk '/ / { print; next } ++n % 100 == 0 { print "  … " n " packages compiled"; fflush() }'
	@$(BIN)/demo.d/demo $(if $(REAL),--real) $(if $(STAY),--stay) $(ARGS)

# Lint runs the checks of go vet, which go test would repeat in part, for all dependencies with the race detector again.
VETTED := -vet=off

# What a change of a branch can break at once; PKGS=./... checks all packages. Without git, all are checked.
CHANGED = $(shell { git diff --name-only $$(git merge-base origin/main HEAD 2>/dev/null || echo HEAD); git ls-files --others --exclude-standard; } | \
	grep -E '\.go$$|/testdata/' | grep -vE '^(release|test/(conformance|controlplane|deploy|lint|reference|snapshotcontroller))/' | \
	sed 's|/testdata/.*|/x|' | xargs -r dirname | sort -u | while read -r d; do ls $$d/*.go >/dev/null 2>&1 && echo ./$$d; done)
PKGS ?= $(if $(shell git rev-parse HEAD 2>/dev/null),$(sort ./test/layout $(CHANGED)),./...)

.PHONY: check
check: ## Check formatting, compilation, lint and short tests of the packages that differ from origin/main; PKGS=./... checks all
	@out="$$(gofmt -l .)" || exit 1; if [ -n "$$out" ]; then echo "not formatted: $$out"; exit 1; fi
	$(PURE) go build ./...
	$(PURE) go build -C test/lint -o ../../$(BIN)/lint .
	$(PURE) $(BIN)/lint -tags browser $(PKGS)
	$(PURE) go test $(VETTED) -short $(PKGS)

.PHONY: test
test: ## Run all tests that need no real control plane: they use an API server in memory
	$(PURE) go test $(VETTED) -p 4 -timeout 30m ./nodecontroller/nodecleanup ./...

# Each process takes more memory and a tenth less CPU time.
test-all test-browser test-reference: export GOGC ?= 400
# A real etcd and kube-apiserver.
test-all test-browser test-reference: export KUBETEST := real

.PHONY: test-all
test-all: lint ## Run the linters and all tests on a real control plane, with the race detector; needs a C compiler
	$(MAKE) --no-print-directory -j 2 test-race test-others

.PHONY: test-race
test-race: # three packages at a time, as many wait more than they compute; the longest first
	go test -race $(VETTED) -p 3 -timeout 60m ./test/e2e ./nodecontroller/nodecleanup ./...

.PHONY: test-others
test-others:
	$(PURE) go test $(VETTED) -run TestPromises ./nodecontroller/nodecleanup/
	$(PURE) go test $(VETTED) -run TestHundredNodes ./provisioner/
	cd test/controlplane && go test -race ./supervise/
	cd release && $(PURE) go test ./... # builds the program with the flags of the Dockerfile
	@if [ $$(id -u) = 0 ]; then $(MAKE) --no-print-directory test-reference; else echo "not tested: changes from and to the sidecars themselves, which need root"; fi

.PHONY: test-reference
test-reference: ## Test the rolling change and the rollback with csi-provisioner and csi-attacher themselves, as root
	SIDECARS=csi-provisioner,csi-attacher $(PURE) go test -count=1 $(VETTED) -run 'TestRollingChange|TestRollbackOfTheAttachersFinalizer' ./test/e2e

.PHONY: stories
stories: export KUBETEST := real
stories: export SIDECARS := csi-provisioner,csi-attacher,csi-resizer,csi-snapshotter
stories: ## Play the stories of docs/beside-the-sidecars.md with the sidecars and storage-controller; STORY=name plays one, UPDATE=1 writes the page
	$(PURE) go test -count=1 $(VETTED) -timeout 30m -parallel 12 -v -run 'TestBesideTheSidecars$(if $(STORY),/story/^$(STORY)$$)' ./test/e2e

CHROMIUM ?= chromium

.PHONY: test-browser
test-browser: ## Test /statusz with Chromium; SCREENSHOTS=DIR keeps screenshots
	@command -v $(CHROMIUM) >/dev/null || { echo "$(CHROMIUM) not found. Install it, on Debian with: apt-get install --no-install-recommends chromium. Or use another browser: make test-browser CHROMIUM=google-chrome" >&2; exit 1; }
	CHROMIUM=$(CHROMIUM) SCREENSHOTS=$(abspath $(SCREENSHOTS)) go test -race -count=1 -timeout 20m -tags browser -run InABrowser ./test/e2e

.PHONY: lint
lint: ## Check formatting, and run the checks of go vet and staticcheck
	@out="$$(gofmt -l .)" || exit 1; if [ -n "$$out" ]; then echo "not formatted: $$out"; exit 1; fi
	$(PURE) go build -C test/lint -o ../../$(BIN)/lint .
	$(PURE) $(BIN)/lint -tags browser ./...
	cd test/deploy && $(PURE) ../../$(BIN)/lint ./...
	cd test/conformance && $(PURE) ../../$(BIN)/lint .

.PHONY: generate
generate: ## Write generated files: pages in docs/, tables, copies in the chart
	UPDATE=1 go test -count=1 -run 'TestDocs|TestMigrateCommand' ./cmd/storage-controller ./internal/app ./test/layout ./test/defects
	UPDATE=1 go test -count=1 -run TestChartHasTheFiles ./test/e2e

.PHONY: fuzz
fuzz: ## Fuzz each target for FUZZTIME (default 30s)
	@set -e; for target in $$(grep -rhoE '^func Fuzz[A-Za-z]+' --include=*_test.go . | awk '{print $$2}'); do \
		dir=$$(dirname $$(grep -rlE "^func $$target\(" --include=*_test.go .)); \
		echo "$$dir $$target"; go test -run '^$$' -fuzz "^$$target$$" -fuzztime $${FUZZTIME:-30s} $$dir; done

.PHONY: test-matrix
test-matrix: ## Test the main stories on each Kubernetes version and write docs/support-matrix.md; ARGS=-minor=1.35 tests one
	$(PURE) go run ./test/matrix $(ARGS)

.PHONY: simulate
simulate: ## Run SEEDS histories (default 1000) of the simulation, in a process per core; SEED=n replays one
	go test -c -o bin/simulation ./test/simulation
	n=$(if $(SEED),1,$$(nproc)); share=$$((($(if $(SEED),1,$(or $(SEEDS),1000)) + n - 1) / n)); cd test/simulation && \
	seq $(or $(SEED),$(FROM),1) $$share $$(($(or $(SEED),$(FROM),1) + share * n - 1)) | \
	xargs -P $$n -n 1 ../../bin/simulation -test.timeout 24h -test.v -test.run TestSeeds -seeds $$share -from

.PHONY: simulate-repeat
simulate-repeat: ## Run SEEDS histories (default 10000) in two processes, or that of SEED RUNS times (default 500), and compare them
	go test -count=1 -timeout 24h -v -run TestSameSeedSameHistory ./test/simulation -args \
		$(if $(SEED),-same-from $(SEED) -same 1 -runs $(or $(RUNS),500),-same-from $(or $(FROM),0) -same $(or $(SEEDS),10000)) -procs $(or $(PROCS),1)

.PHONY: simulate-exhaustive
simulate-exhaustive: ## Explore all orders of EVENTS events with FAULTS faults (10 and 2), after FROM others, in small scopes, for TIME (10m)
	go test -count=1 -timeout 24h -v -run 'TestSmallScopes$$' ./test/simulation -args -scope-from '$(or $(FROM),0 8)' \
		-scope-events $(or $(EVENTS),10) -scope-faults $(or $(FAULTS),2) -scope-time $(or $(TIME),10m) -scopes '$(SCOPE)'

# The packages whose decisions simulate-coverage counts, and parts of the names of their files.
DECIDING := internal/intent provisioner attacher resizer snapshotter topolvm capacity nodecontroller/nodecleanup
DECISIONS := decide|rules|state|plan|permit|resume

.PHONY: simulate-coverage
simulate-coverage: ## Run SEEDS histories (default 1000) of the simulation and list the blocks of decisions that none takes
	go test -c -covermode=atomic -coverpkg=$$(echo $(DECIDING:%=./%) | tr ' ' ,) -o bin/simulation-coverage ./test/simulation
	rm -rf bin/coverage.d && mkdir -p bin/coverage.d
	n=$$(nproc); share=$$((($(or $(SEEDS),1000) + n - 1) / n)); cd test/simulation && \
	seq $(or $(FROM),1) $$share $$(($(or $(FROM),1) + share * n - 1)) | xargs -P $$n -I '{}' ../../bin/simulation-coverage \
		-test.timeout 24h -test.run TestSeeds -seeds $$share -from '{}' -test.coverprofile ../../bin/coverage.d/'{}'
	@awk -F '[ :,]' 'FNR > 1 && $$1 ~ /\/[a-z_]*($(DECISIONS))[a-z_]*\.go$$/ { at = $$1 ":" $$2; taken[at] += $$NF } \
		END { for (at in taken) { all++; if (!taken[at]) { never++; sub(".*/storage-controller/", "", at); print at | "sort -V" } } \
		close("sort -V"); print never + 0 " of " all " blocks were never taken" }' bin/coverage.d/*

.PHONY: simulate-mutations
simulate-mutations: ## Remove one safety rule after the other and count the seeds until the simulation finds it; ARGS=-only=NAME
	go run ./test/simulation/mutations $(ARGS)

.PHONY: show-defect
show-defect: ## Show defect N of docs/defects.md on the last commit that had it; ARGS=-print prints the commands
	$(PURE) go run ./test/defects $(ARGS) $(N)

.PHONY: bench
bench: ## Run the benchmark of volumes, with COMPARE=1 against the sidecars, with ARGS=--capacity of capacity; see go run ./test/bench --help
	go run ./test/bench $(if $(COMPARE),--compare) $(ARGS)

.PHONY: conformance
conformance: ## Run the Kubernetes specifications for CSI drivers on a real node, as root; ARGS="--focus=REGEXP --binding=Immediate --only=storage-controller --procs=6 --page=" or ARGS=--performance
	test/conformance/conformance.sh $(ARGS)

.PHONY: vulncheck
vulncheck: ## Check all modules for known vulnerabilities; without the database it warns, with REQUIRED=1 it fails
	@for dir in . release; do \
		out=$$(cd $$dir && go run $(GOVULNCHECK) ./... 2>&1) && { echo "$$dir: $$out"; continue; }; \
		echo "$$out"; \
		grep -qE 'dial tcp|no such host|403 Forbidden|i/o timeout|proxyconnect' <<< "$$out" || exit 1; \
		echo "$$dir: not checked: the vulnerability database cannot be reached"; \
		[ -z "$(REQUIRED)" ] || exit 1; \
	done

RELEASE := GOTOOLCHAIN=go$(shell sed -n 's/^go //p' go.mod) go run .

.PHONY: release
release: ## Build the release VERSION (v1.2.3) into dist/VERSION; REPOSITORY=image in the chart, DOWNLOAD_URL=place of the archives
	cd release && $(RELEASE) build --version $(VERSION) $(if $(REPOSITORY),--repository $(REPOSITORY)) $(if $(DOWNLOAD_URL),--download-url $(DOWNLOAD_URL))

.PHONY: verify-release
verify-release: ## Verify dist/VERSION
	cd release && $(RELEASE) verify ../dist/$(VERSION)

.PHONY: controlplane
controlplane: ## Build the control plane for tests and demo into bin/
	cd test/controlplane && $(PURE) go build -ldflags '-s -w' -o ../../$(BIN)/controlplane .

.PHONY: render
render: ## Print an overlay of deploy/; OVERLAY=all-in-one
	@cd test/deploy && go run . kustomize ../../deploy/overlays/$(or $(OVERLAY),all-in-one)

.PHONY: clean
clean: ## Remove bin/
	rm -rf $(BIN)
