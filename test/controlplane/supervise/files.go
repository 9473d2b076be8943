// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// auditPolicy leaves out the stage at which a request has no result yet. Watches are
// recorded twice: when they begin (ResponseStarted) and when they end.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
`

// kubeconfig is that of the administrator. The certificate of the API server is
// one that it made for itself, and serves on loopback only: it is not checked.
func kubeconfig(port int, token string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: controlplane
contexts: [{name: controlplane, context: {cluster: controlplane, user: admin}}]
clusters: [{name: controlplane, cluster: {server: "https://127.0.0.1:%d", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: %q}}]
`, port, token)
}

// schedulerConfig lets the scheduler try a pod again after a second. By default it waits
// up to ten: the pods of a driver that is full on one node then take minutes to find another.
func schedulerConfig(kubeconfig string) string {
	return fmt.Sprintf(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: %q, qps: 2000, burst: 4000}
leaderElection: {leaderElect: false}
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 1
`, kubeconfig)
}

// writeFiles writes what the components read at their start. The token and the
// key of service accounts are kept when they exist, since data in the same
// directory belongs to them.
func (o Options) writeFiles(p ports) error {
	tokens, err := o.keep("tokens.csv", func() ([]byte, error) {
		return []byte(rand.Text() + `,admin,admin,"system:masters"` + "\n"), nil
	})
	if err != nil {
		return err
	}
	if _, err := o.keep("service-account.key", newKey); err != nil {
		return err
	}
	token, _, _ := strings.Cut(string(tokens), ",")
	for name, content := range map[string]string{
		"kubeconfig":        kubeconfig(p[APIServer], token),
		"scheduler.yaml":    schedulerConfig(o.file("kubeconfig")),
		"audit-policy.yaml": auditPolicy,
	} {
		if err := os.WriteFile(o.file(name), []byte(content), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// keep returns the content of a file, which it writes first when there is none.
func (o Options) keep(name string, content func() ([]byte, error)) ([]byte, error) {
	data, err := os.ReadFile(o.file(name))
	if !errors.Is(err, fs.ErrNotExist) {
		return data, err
	}
	if data, err = content(); err != nil {
		return nil, fmt.Errorf("making %s: %w", name, err)
	}
	return data, os.WriteFile(o.file(name), data, 0o600)
}

func newKey() ([]byte, error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}), nil
}
