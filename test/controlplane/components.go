package main

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// The components, by the name of their subcommand and of their log file.
const (
	etcd              = "etcd"
	apiServer         = "apiserver"
	controllerManager = "controller-manager"
	schedulerName     = "scheduler"
)

// options is what "up" was asked for.
type options struct {
	dir           string
	components    []string // besides etcd and the API server
	audit         bool
	stopWithStdin bool
	detach        bool
}

// ports are the loopback ports of the components. They stay the same when a
// component is restarted.
type ports struct{ etcdClient, etcdPeer, apiServer int }

// freePorts asks the system for ports that nobody uses. Somebody else may take
// one before its component does; up tries again with others then.
func freePorts() (ports, error) {
	var found [3]int
	for i := range found {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return ports{}, fmt.Errorf("looking for a free port: %w", err)
		}
		defer l.Close() // only after all were found, so that they differ
		found[i] = l.Addr().(*net.TCPAddr).Port
	}
	return ports{found[0], found[1], found[2]}, nil
}

// arguments is the command line of a component.
func (o options) arguments(component string, p ports) []string {
	file := func(name string) string { return filepath.Join(o.dir, name) }
	local := func(port int) string { return fmt.Sprintf("http://127.0.0.1:%d", port) }
	switch component {
	case etcd:
		return []string{
			"--data-dir=" + file("etcd"), "--name=default", "--unsafe-no-fsync", "--log-level=warn",
			"--listen-client-urls=" + local(p.etcdClient), "--advertise-client-urls=" + local(p.etcdClient),
			"--listen-peer-urls=" + local(p.etcdPeer), "--initial-advertise-peer-urls=" + local(p.etcdPeer),
			"--initial-cluster=default=" + local(p.etcdPeer),
			"--quota-backend-bytes=4294967296", "--auto-compaction-retention=5m",
		}
	case apiServer:
		args := []string{
			"--etcd-servers=" + local(p.etcdClient), "--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", p.apiServer),
			"--cert-dir=" + file("certificates"), "--token-auth-file=" + file("tokens.csv"), "--authorization-mode=RBAC",
			"--service-account-key-file=" + file("service-account.key"), "--service-account-signing-key-file=" + file("service-account.key"),
			"--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24",
			"--disable-admission-plugins=ServiceAccount", "--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000",
			"--watch-cache=true", "--v=1",
		}
		if o.audit {
			args = append(args, "--audit-policy-file="+file("audit-policy.yaml"), "--audit-log-path="+file("audit.log"),
				"--audit-log-mode=blocking", "--audit-log-maxsize=4096", "--audit-log-format=json")
		}
		return args
	case controllerManager:
		return []string{
			"--kubeconfig=" + file("kubeconfig"), "--leader-elect=false", "--secure-port=0", "--use-service-account-credentials=false",
			"--kube-api-qps=2000", "--kube-api-burst=4000", "--v=1",
			"--service-account-private-key-file=" + file("service-account.key"),
			"--pvclaimbinder-sync-period=5s", "--attach-detach-reconcile-sync-period=5s", "--concurrent-gc-syncs=5",
			"--controllers=" + strings.Join([]string{
				"persistentvolume-binder-controller", "persistentvolume-expander-controller", "persistentvolume-attach-detach-controller",
				"persistentvolumeclaim-protection-controller", "persistentvolume-protection-controller", "garbage-collector-controller",
				"ephemeral-volume-controller", "statefulset-controller", "namespace-controller",
			}, ","),
		}
	default:
		return []string{"--kubeconfig=" + file("kubeconfig"), "--leader-elect=false", "--secure-port=0", "--kube-api-qps=2000", "--kube-api-burst=4000", "--v=1"}
	}
}

const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
`

// kubeconfig is that of the administrator. The certificate of the API server is
// one it made for itself, on loopback: it is not checked.
func kubeconfig(port int, token string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: controlplane
contexts: [{name: controlplane, context: {cluster: controlplane, user: admin}}]
clusters: [{name: controlplane, cluster: {server: "https://127.0.0.1:%d", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: %q}}]
`, port, token)
}

// writeFiles writes what the components read at their start. What exists is kept,
// so that a directory can be used again with its data.
func (o options) writeFiles(p ports) error {
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return err
	}
	token := rand.Text()
	if data, err := os.ReadFile(filepath.Join(o.dir, "tokens.csv")); err == nil {
		token, _, _ = strings.Cut(string(data), ",")
	}
	files := map[string]string{
		"tokens.csv":        token + ",admin,admin,\"system:masters\"\n",
		"audit-policy.yaml": auditPolicy,
		"kubeconfig":        kubeconfig(p.apiServer, token),
	}
	keyFile := filepath.Join(o.dir, "service-account.key")
	if _, err := os.Stat(keyFile); err != nil {
		key, err := rsa.GenerateKey(rand.Reader, 2048)
		if err != nil {
			return fmt.Errorf("making the key of service accounts: %w", err)
		}
		files["service-account.key"] = string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(o.dir, name), []byte(content), 0o600); err != nil {
			return err
		}
	}
	return nil
}
