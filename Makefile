# Everything here needs Go, git and make; the tests need a C compiler too, for the race detector.
SHELL := /bin/bash
BIN := bin
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the program into bin/, static and stripped as it is released
	CGO_ENABLED=0 go build -trimpath -tags grpcnotrace -ldflags '-s -w -X main.version=$(VERSION)' -o $(BIN)/storage-controller ./cmd/storage-controller

.PHONY: demo
demo: ## Show it at work on a real control plane; ARGS=--stay keeps that up
	@go run ./test/demo $(ARGS)

.PHONY: test
test: lint ## Run the linters and all tests, with the race detector
	go test -race -timeout 30m ./...
	cd test/controlplane && go test -race ./supervise/

CHROMIUM ?= chromium

.PHONY: test-browser
test-browser: ## Look at /statusz with Chromium; SCREENSHOTS=DIR keeps what is seen
	@command -v $(CHROMIUM) >/dev/null || { echo "There is no $(CHROMIUM) here. Install it, on Debian with: apt-get install --no-install-recommends chromium. Or name another: make test-browser CHROMIUM=google-chrome" >&2; exit 1; }
	CHROMIUM=$(CHROMIUM) SCREENSHOTS=$(abspath $(SCREENSHOTS)) go test -race -count=1 -timeout 20m -tags browser -run InABrowser ./test/e2e

.PHONY: lint
lint: ## Check formatting, vet and staticcheck
	@out="$$(gofmt -l .)"; if [ -n "$$out" ]; then echo "not formatted: $$out"; exit 1; fi
	go vet -tags browser ./...
	go run $(STATICCHECK) -tags browser ./...
	cd test/deploy && CGO_ENABLED=0 go vet ./... # as it is built for the tests, so that nothing is compiled twice

.PHONY: generate
generate: ## Write what is generated: pages of docs/, tables, and copies in the chart
	UPDATE=1 go test -count=1 -run TestDocs ./cmd/storage-controller
	UPDATE=1 go test -count=1 -run TestRules ./internal/tools/doctor
	UPDATE=1 go test -count=1 -run TestChartHasTheFiles ./test/e2e

.PHONY: scenarios
scenarios: ## Print which acceptance scenarios are tested; ARGS=-missing those that are not
	@go run ./test/scenarios $(ARGS)

.PHONY: fuzz
fuzz: ## Fuzz each target for FUZZTIME (default 30s)
	@set -e; for target in $$(grep -rhoE '^func Fuzz[A-Za-z]+' --include=*_test.go . | awk '{print $$2}'); do \
		dir=$$(dirname $$(grep -rlE "^func $$target\(" --include=*_test.go .)); \
		echo "$$dir $$target"; go test -run '^$$' -fuzz "^$$target$$" -fuzztime $${FUZZTIME:-30s} $$dir; done

.PHONY: bench
bench: ## Measure the life of volumes, or with ARGS=--capacity the publishing of capacity; ARGS as for go run ./test/bench --help
	go run ./test/bench $(ARGS)

.PHONY: controlplane
controlplane: ## Build the control plane of tests and demo into bin/
	cd test/controlplane && CGO_ENABLED=0 go build -ldflags '-s -w' -o ../../$(BIN)/controlplane .

.PHONY: render
render: ## Print an overlay of deploy/; OVERLAY=all-in-one
	@cd test/deploy && go run . kustomize ../../deploy/overlays/$(or $(OVERLAY),all-in-one)

.PHONY: clean
clean: ## Remove what was built
	rm -rf $(BIN)
