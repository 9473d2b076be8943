#!/usr/bin/env bash
# Builds all programs and images, and runs node.sh in namespaces of its own for processes, mounts and network. Its
# arguments are the flags of the Go program in this directory. It reads and writes bin/conformance only.
set -eu -o pipefail
cd "$(dirname "$0")/../.."
export ROOT=$PWD DIR=$PWD/bin/conformance CGO_ENABLED=0
export BIN=$DIR/bin STATE=$DIR/state LOG=$DIR/log HERE=$ROOT/test/conformance

[ "$(id -u)" = 0 ] || { echo "conformance: a node needs root" >&2; exit 1; }
for program in containerd runc busybox /usr/lib/cni/bridge ip losetup mkfs.ext4 openssl; do
	command -v $program > /dev/null || { echo "conformance: $program is not installed. On Debian: apt-get install --no-install-recommends" \
		"containerd runc busybox-static containernetworking-plugins iproute2 mount e2fsprogs openssl" >&2; exit 1; }
done
rm -rf "$STATE" "$LOG" && mkdir -p "$BIN" "$STATE" "$LOG"

build() { # DIRECTORY ARGUMENTS…
	echo "$(date +%T) compiling: $*"
	(cd "$1" && go "$2" -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$kubernetes" -o "$BIN/${OUT:-}" "${@:3}")
}
kubernetes=$(cd test/controlplane && go list -m -f '{{.Version}}' k8s.io/kubernetes)
[ "$(cd "$HERE" && go list -m -f '{{.Version}}' k8s.io/kubernetes)" = "$kubernetes" ] ||
	{ echo "conformance: test/conformance/go.mod and test/controlplane/go.mod have different versions of Kubernetes" >&2; exit 1; }
build . build ./cmd/storage-controller ./test/hostdriver
build test/controlplane build .
build test/reference build tool                 # csi-provisioner, csi-attacher, csi-resizer
build test/snapshotcontroller build tool        # snapshot-controller, csi-snapshotter
build test/conformance build . ./registrar tool # kubelet, kubectl, agnhost, ginkgo
OUT=e2e.test build test/conformance test -c ./e2e

export SIDECARS="csi-provisioner csi-attacher csi-resizer csi-snapshotter"
# The sidecars send 5 requests per second by default; storage-controller has no limit.
export LIMITS="--kube-api-qps=100000 --kube-api-burst=100000"
version() { echo "$1 $(go version -m "$BIN/$1" | awk '$1 == "mod" { print $3 }')"; }
cat > "$STATE/facts.md" << FACTS
- $(date -u +%F), $(nproc) CPUs, Linux $(uname -r), Kubernetes $kubernetes, containerd $(containerd --version | cut -d' ' -f3), $(runc --version | head -1)
- reference: $(for p in $SIDECARS; do version $p; done | paste -sd, | sed 's/,/, /g'), with \`$LIMITS\`
- storage-controller: $(git describe --tags --always --dirty)
- both sides: $(version snapshot-controller) with --kube-api-qps=100
FACTS
# Only the ServiceAccount and the permissions: storage-controller runs as a process of the node.
(cd test/deploy && go run . kustomize "$ROOT/deploy/overlays/all-in-one") |
	awk 'BEGIN { RS = "---\n" } /\nkind: (ServiceAccount|(Cluster)?Role(Binding)?)\n/ { print $0 "---" }' > "$STATE/permissions.yaml"
CRDS=$(go list -m -f '{{.Dir}}' github.com/kubernetes-csi/external-snapshotter/client/v8)/config/crd
export CRDS

# All images have the same content: busybox, the GNU tools whose options specifications use, and agnhost. The shell is
# bash, because that of Debian's busybox prefers its own dd.
images() {
	local root=$STATE/image/root out=$STATE/image/out tool path lib digest entries=() name i=0
	mkdir -p "$root"/{bin,usr/bin,etc} "$out" && install -d -m 1777 "$root/tmp"
	cp "$BIN/agnhost" "$root/agnhost"
	for tool in busybox bash dd stat sha256sum blockdev mount umount mountpoint findmnt df ls cp rm cat timeout head tail od chmod chown \
		touch mkfs.ext4 nsenter truncate sync lsblk; do
		path=$(command -v $tool) && cp -L "$path" "$root/bin/$tool"
		for lib in $(ldd "$path" 2> /dev/null | grep -o '/[^ )]*'); do install -D "$lib" "$root$lib"; done
	done
	ln -s bash "$root/bin/sh" && ln -s /bin/bash "$root/usr/bin/bash" && ln -s /bin/bash "$root/usr/bin/sh"
	for tool in $(busybox --list); do [ -e "$root/bin/$tool" ] || ln -s busybox "$root/bin/$tool"; done
	printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' > "$root/etc/passwd"
	printf 'root:x:0:\nnogroup:x:65534:\n' > "$root/etc/group"
	tar -C "$root" --owner=0 --group=0 --numeric-owner -cf "$out/layer.tar" .
	digest=$(sha256sum "$out/layer.tar" | cut -d' ' -f1)
	for name in conformance.local/agnhost:1 $("$BIN/e2e.test" --list-images | grep -E '/(agnhost|busybox|nginx|glibc-dns-testing):'); do
		case $name in
		*/agnhost:*) run='"Entrypoint":["/agnhost"],"Cmd":["pause"]' ;;
		*/nginx:*) run='"Cmd":["sleep","1000000"]' ;;
		*) run='"Cmd":["sh"]' ;;
		esac
		printf '{"architecture":"%s","os":"linux","config":{"Env":["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],%s},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
			"$(go env GOARCH)" "$run" "$digest" > "$out/$((++i)).json"
		entries+=("{\"Config\":\"$i.json\",\"RepoTags\":[\"$name\"],\"Layers\":[\"layer.tar\"]}")
	done
	(IFS=,; echo "[${entries[*]}]") > "$out/manifest.json"
	tar -C "$out" -cf "$STATE/images.tar" .
	rm -r "$STATE/image"
}
echo "$(date +%T) packing images" && images

# Kernel parameters, which the kubelet sets, loop devices and control groups belong to the whole machine.
parameters=$(sysctl vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys \
	kernel.keys.root_maxbytes 2> /dev/null | tr -d ' ' || true)
loops() { losetup --list --noheadings --output=NAME | sort; }
loops > "$STATE/loops"
cleanup() {
	set +e
	sysctl -q -w $parameters # a sandbox may forbid it, to the kubelet too
	loops | comm -13 "$STATE/loops" - | xargs -r -n1 losetup --detach # of volumes that were not deleted
	find /sys/fs/cgroup -depth -type d -path '*/k8s.io*' -exec rmdir {} + 2> /dev/null
	rm -rf "$STATE"
}
trap cleanup EXIT
unshare --mount --pid --net --fork --mount-proc --kill-child --propagation private bash "$HERE/node.sh" "$@"
