# The first process of the namespaces of conformance.sh: starts a Kubernetes cluster of one node, the drivers and the
# controllers, and runs the specifications. Everything ends with it.
set -eu -o pipefail
trap 'exit 1' INT TERM
export KUBECONFIG=$STATE/kubeconfig PATH=$BIN:$PATH NODE=conformance IP=10.88.0.1
cd "$STATE"

start() { # NAME COMMAND…
	"${@:2}" > "$LOG/$1.log" 2>&1 < /dev/null &
	echo $! > "$1.pid"
}
await() { # COMMAND…: repeats it until it succeeds, for at most three minutes
	for _ in $(seq 180); do "$@" > "$LOG/await.log" 2>&1 && return; sleep 1; done
	echo "conformance: gave up on: $*" >&2 && cat "$LOG/await.log" >&2 && return 1
}
kubeconfig() { # TOKEN
	cat << K
{apiVersion: v1, kind: Config, current-context: x, contexts: [{name: x, context: {cluster: c, user: u}}],
 clusters: [{name: c, cluster: {server: "https://$IP:6443", insecure-skip-tls-verify: true}}], users: [{name: u, user: {token: $1}}]}
K
}

echo "$(date +%T) starting the node"
mount --make-rshared / # as the kubelet and its pods require
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/log
mkdir -p kubelet /var/lib/kubelet cni && mount --bind kubelet /var/lib/kubelet
ip link set lo up && ip link add pods type bridge && ip address add $IP/16 dev pods && ip link set pods up && ip route add default dev pods
openssl genrsa -out service-account.key 2048 2> /dev/null
echo 'administrator,admin,1,"system:masters"' > tokens.csv
kubeconfig administrator > kubeconfig
cat > cni/10-pods.conflist << K
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods", "isGateway": true, "ipam": {"type": "host-local",
"dataDir": "$STATE/addresses", "ranges": [[{"subnet": "10.88.0.0/16", "rangeStart": "10.88.1.1", "gateway": "$IP"}]]}}]}
K
cat > containerd.toml << K
version = 2
root = "$STATE/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "conformance.local/agnhost:1"
  disable_apparmor = true
  restrict_oom_score_adj = true # without CAP_SYS_RESOURCE, runc fails otherwise
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$STATE/cni"
K
cat > kubelet.yaml << K
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
maxPods: 250
serializeImagePulls: false
resolvConf: ""
volumePluginDir: $STATE/flexvolumes
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: "0%", nodefs.available: "0%", imagefs.available: "0%", nodefs.inodesFree: "0%", imagefs.inodesFree: "0%"}
K
start containerd containerd --config=containerd.toml
start etcd controlplane etcd --unsafe-no-fsync --log-level=warn --data-dir=etcd
start apiserver controlplane apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --advertise-address=$IP \
	--cert-dir=certificates --token-auth-file=tokens.csv --authorization-mode=RBAC --allow-privileged \
	--service-account-key-file=service-account.key --service-account-signing-key-file=service-account.key \
	--service-account-issuer=https://kubernetes.default.svc --service-cluster-ip-range=10.96.0.0/16 \
	--kubelet-preferred-address-types=InternalIP --max-requests-inflight=2000 --max-mutating-requests-inflight=1000
await kubectl get --raw=/readyz
start controller-manager controlplane controller-manager --kubeconfig=kubeconfig --leader-elect=false --kube-api-qps=2000 \
	--kube-api-burst=4000 --service-account-private-key-file=service-account.key --root-ca-file=certificates/apiserver.crt
start scheduler controlplane scheduler --kubeconfig=kubeconfig --leader-elect=false
await ctr --namespace=k8s.io images import images.tar
start kubelet kubelet --config=kubelet.yaml --kubeconfig=kubeconfig --hostname-override=$NODE --node-ip=$IP --cert-dir=kubelet-certificates --v=2
await kubectl wait --for=condition=Ready node/$NODE --timeout=5s
for crd in "$CRDS"/*snapshot*.yaml; do kubectl create -f "$crd" > /dev/null; done
# With the default of 5 requests per second, snapshot-controller adds its finalizer to a VolumeGroupSnapshot so late that a
# specification has deleted it before. Its content is never released then, on either side.
start snapshot-controller snapshot-controller --kubeconfig=kubeconfig -v=4 --feature-gates=CSIVolumeGroupSnapshot=true --kube-api-qps=100 \
	--kube-api-burst=200

for side in reference storage-controller; do
	driver=$side.conformance.example.com socket=/var/lib/kubelet/plugins/$side.conformance.example.com/csi.sock
	start $side-driver hostdriver --mount --driver-name=$driver --endpoint=unix://$socket --root="$STATE/volumes-$side" \
		--node-name=$NODE --node=$NODE=topology.conformance.example.com/node=$NODE
	start $side-registrar registrar --driver-name=$driver --csi-address=$socket --registration=/var/lib/kubelet/plugins_registry/$driver.sock
	sed "s/@DRIVER@/$driver/" "$HERE/objects.yaml" | kubectl create -f - > /dev/null
	for binding in immediate waitforfirstconsumer; do
		sed "/PerformanceTestOptions/d; s/@DRIVER@/$driver/; s/@BINDING@/$binding/" "$HERE/testdriver.yaml" > $side-$binding.yaml
	done
	sed "s/@DRIVER@/$driver/; s/@BINDING@/immediate/" "$HERE/testdriver.yaml" > $side-performance.yaml
	namespace=$side && [ $side = reference ] || namespace=csi-example # that of the overlay
	kubectl create namespace $namespace > /dev/null
	export NAMESPACE=$namespace POD_NAMESPACE=$namespace POD_NAME=$NODE
	capacity="--enable-capacity --capacity-ownerref-level=-1 --capacity-for-immediate-binding"
	if [ $side = reference ]; then
		for sidecar in $SIDECARS; do
			case $sidecar in
			csi-provisioner) flags=$capacity ;;
			csi-snapshotter) flags=--feature-gates=CSIVolumeGroupSnapshot=true ;;
			*) flags= ;;
			esac
			start $side-$sidecar $sidecar --kubeconfig=kubeconfig --csi-address=$socket -v=4 $LIMITS $flags
		done
	else
		kubectl create -f permissions.yaml > /dev/null
		kubeconfig "$(kubectl create token csi-controller --namespace=$namespace --duration=24h)" > kubeconfig-$side
		start $side storage-controller all --kubeconfig=kubeconfig-$side --csi-address=$socket -v=4 --leader-election --node-cleanup=off $capacity
	fi
done
for side in reference storage-controller; do
	await sh -c "kubectl get csinode $NODE -o jsonpath='{.spec.drivers[*].name}' | grep $side.conformance.example.com"
done
conformance "$@"
