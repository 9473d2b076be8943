// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/typed/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

func TestMain(m *testing.M) {
	if os.Getenv("KUBETEST_CHILD") != "" {
		child()
	}
	Main(m)
}

// child starts a control plane and waits to be killed.
func child() {
	if _, err := Start(context.Background(), Config{SnapshotController: true}); err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	fmt.Println("started")
	select {}
}

// TestAwait: a check whose request never gets a response is repeated, and the last error is returned in the end.
func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		checks := 0
		hang := func(ctx context.Context) error {
			checks++
			<-ctx.Done()
			return errors.New("no response")
		}
		if err := Await(t.Context(), func(ctx context.Context) error {
			if checks == 0 {
				return hang(ctx)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		if err := Await(t.Context(), hang); err == nil || !strings.Contains(err.Error(), "no response") || checks != 4 {
			t.Errorf("%v after %d checks, want 4", err, checks)
		}
	})
}

func TestAuditShowsWhatWasDone(t *testing.T) {
	c := Get(t, WithAudit())
	mark, err := c.AuditOffset()
	if err != nil {
		t.Fatal(err)
	}
	ns := Namespace(t, c)
	records, err := c.AuditSince(mark, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range records {
		if r.Verb == "create" && r.Resource() == "namespaces" && r.IsWrite() && r.Status.Code == 201 {
			return
		}
	}
	t.Errorf("creating namespace %s is not among %+v", ns, records)
}

// TestAuditLogWhileItIsWritten takes the mark while a line is incomplete, and has an API server killed within one.
func TestAuditLogWhileItIsWritten(t *testing.T) {
	c := &ControlPlane{cfg: Config{Dir: t.TempDir(), Audit: true}}
	write := func(text string) {
		t.Helper()
		f, err := os.OpenFile(c.auditLog(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	line := func(verb string) string { // longer than one read
		return fmt.Sprintf(`{"kind":"Event","apiVersion":"audit.k8s.io/v1","verb":%q,"x":%q}`, verb, strings.Repeat("x", 100_000)) + "\n"
	}
	written := ""
	for _, step := range []struct{ before, after, want string }{
		{"", line("get"), "get"},
		{line("list"), line("get"), "get"},
		{line("list") + line("get")[:20], line("get")[20:], "get"},
		{line("get")[:99_000], line("get")[99_000:] + line("list"), "get list"},
		{line("list") + line("patch")[:70], line("get") + line("list"), "get list"},
		{"", line("patch")[:99_000], ""},
	} {
		write(step.before)
		mark, err := c.AuditOffset()
		if err != nil {
			t.Fatal(err)
		}
		write(step.after)
		records, err := c.AuditSince(mark, "")
		if err != nil {
			t.Fatal(err)
		}
		var verbs []string
		for _, r := range records {
			verbs = append(verbs, r.Verb)
		}
		if got := strings.Join(verbs, " "); got != step.want {
			t.Errorf("after %d bytes: %q, want %q", len(written), got, step.want)
		}
		written += step.before + step.after
	}
	if all, err := c.AuditSince(0, ""); err != nil || len(all) != 10 {
		t.Errorf("%d events in all, %v", len(all), err)
	}
}

func TestRestartKeepsData(t *testing.T) {
	c := Get(t, WithAudit())
	ns := Namespace(t, c)
	before, etcd := c.PID(APIServer), c.PID(Etcd)
	if err := c.Halt(t.Context(), APIServer); err != nil {
		t.Fatal(err)
	}
	if pid := c.PID(APIServer); before == 0 || etcd == 0 || pid != 0 {
		t.Errorf("process IDs of API server, etcd, and the halted API server: %d, %d, %d", before, etcd, pid)
	}
	if _, err := c.Client().CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{}); err == nil {
		t.Fatal("the API server answered although it was halted")
	}
	if err := c.Resume(t.Context(), APIServer); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Client().CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
}

func TestUsersHaveOnlyWhatRBACGrants(t *testing.T) {
	c := Get(t, WithAudit())
	client, err := kubernetes.NewForConfig(c.UserConfig(t, "another"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = client.CoreV1().PersistentVolumes().List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("listing volumes: %v, want Forbidden", err)
	}
}

func TestTwoSideBySide(t *testing.T) {
	NeedReal(t)
	first := Get(t, WithAudit())
	second, err := Start(t.Context(), Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Stop()
	if a, b := first.PID(APIServer), second.PID(APIServer); a == b || a == 0 || b == 0 {
		t.Errorf("process IDs of the API servers: %d and %d", a, b)
	}
	ns := Namespace(t, second)
	if _, err := first.Client().CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the first has the namespace of the second: %v", err)
	}
	if _, err := second.Client().CoreV1().ConfigMaps(ns).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x"}},
		metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
}

func TestSnapshotController(t *testing.T) {
	NeedReal(t)
	c, err := Start(t.Context(), Config{SnapshotController: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Stop()
	client, err := snapshotclient.NewForConfig(c.Config())
	if err != nil {
		t.Fatal(err)
	}
	ns := Namespace(t, c)
	bind := func(name string) {
		t.Helper()
		content := &snapshotv1.VolumeSnapshotContent{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: snapshotv1.VolumeSnapshotContentSpec{
			Driver: "drv.example.com", DeletionPolicy: snapshotv1.VolumeSnapshotContentRetain,
			Source:            snapshotv1.VolumeSnapshotContentSource{SnapshotHandle: &name},
			VolumeSnapshotRef: corev1.ObjectReference{Namespace: ns, Name: name},
		}}
		if _, err := client.VolumeSnapshotContents().Create(t.Context(), content, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		snapshot := &snapshotv1.VolumeSnapshot{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: snapshotv1.VolumeSnapshotSpec{
			Source: snapshotv1.VolumeSnapshotSource{VolumeSnapshotContentName: &name},
		}}
		if _, err := client.VolumeSnapshots(ns).Create(t.Context(), snapshot, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		Eventually(t, "the snapshot-controller binds "+name, func(ctx context.Context) error {
			content, err := client.VolumeSnapshotContents().Get(ctx, name, metav1.GetOptions{})
			if err == nil && content.Spec.VolumeSnapshotRef.UID == "" {
				err = errors.New("not bound")
			}
			return err
		})
	}
	bind("first")
	if err := c.Halt(t.Context(), SnapshotController); err != nil {
		t.Fatal(err)
	}
	if p := processesOf(t, "--kubeconfig="+c.Kubeconfig()); len(p) > 0 {
		t.Errorf("the halted snapshot-controller runs: %v", p)
	}
	if err := c.Resume(t.Context(), SnapshotController); err != nil {
		t.Fatal(err)
	}
	bind("second")
}

func TestKilledTestLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "KUBETEST_CHILD=1", "TMPDIR="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, len("started"))
	if _, err := io.ReadFull(out, line); err != nil || string(line) != "started" {
		t.Fatalf("the child said %q: %v", line, err)
	}
	Eventually(t, "the supervisor, etcd, the API server and the snapshot-controller run", func(context.Context) error {
		if n := len(processesOf(t, dir)); n < 4 {
			return fmt.Errorf("%d processes run", n)
		}
		return nil
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	Eventually(t, "all processes have ended and their files are removed", func(context.Context) error {
		if p := processesOf(t, dir); len(p) > 0 {
			return errors.New(strings.Join(p, "\n"))
		}
		left, err := os.ReadDir(dir)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("left behind: %v", left)
		}
		return err
	})
}

func TestContentHashFollowsTheProgram(t *testing.T) {
	module := t.TempDir()
	of := func(modFile string) string {
		t.Helper()
		sum, err := program{modFile: modFile}.contentHash(module)
		if err != nil {
			t.Fatal(err)
		}
		return sum
	}
	hash := func() string { t.Helper(); return of("") }
	write := func(name, content string) {
		t.Helper()
		path := filepath.Join(module, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	last := hash()
	for _, step := range []struct {
		name, content string
		changes       bool
	}{
		{"go.mod", "module x", true},
		{"go.sum", "sum", true},
		{"main.go", "package main", true},
		{"sub/sub.go", "package sub", true},
		{"sub/sub.go", "package sub // changed", true},
		{"sub/sub_test.go", "package sub", false},
		{"sub/notes.txt", "notes", false},
		{"controlplane", "the program itself", false},
		{"versions/1.35.mod", "module x", false},
		{"versions/1.35.sum", "sum", false},
	} {
		write(step.name, step.content)
		if now := hash(); (now != last) != step.changes {
			t.Errorf("after writing %s the hash is %s, before it was %s; want a change: %t", step.name, now, last, step.changes)
		} else {
			last = now
		}
	}
	other := filepath.Join(module, "versions/1.35.mod")
	last = of(other)
	if last == hash() {
		t.Error("another module file does not change the hash")
	}
	for name, changes := range map[string]bool{"versions/1.35.sum": true, "go.sum": false} {
		write(name, "changed")
		if now := of(other); (now != last) != changes {
			t.Errorf("after writing %s: want a change of the hash: %t", name, changes)
		} else {
			last = now
		}
	}
}

func TestStopRemovesTheTemporaryDirectory(t *testing.T) {
	NeedReal(t)
	temporary, err := Start(t.Context(), Config{})
	if err != nil {
		t.Fatal(err)
	}
	temporary.Stop()
	temporary.Stop() // again does nothing
	if _, err := os.Stat(temporary.Dir()); !os.IsNotExist(err) {
		t.Errorf("%s is left behind: %v", temporary.Dir(), err)
	}
}

// processesOf is the command lines of the processes that name dir.
func processesOf(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, f := range files {
		if data, err := os.ReadFile(f); err == nil && strings.Contains(string(data), dir) {
			found = append(found, strings.ReplaceAll(string(data), "\x00", " "))
		}
	}
	return found
}

func TestCompilerOutput(t *testing.T) {
	var o compilerOutput
	for _, part := range []string{"k8s.io/a", "pi/core/v1\nk8s.io/klog/v2\n# k8s.io/x", "/y\nfile.go:1:2: undefined: z\n", "\tmore\n"} {
		if n, err := o.Write([]byte(part)); n != len(part) || err != nil {
			t.Errorf("%d, %v", n, err)
		}
	}
	if n := o.packages.Load(); n != 2 {
		t.Errorf("%d packages, want 2", n)
	}
	if got, want := o.errors.String(), "# k8s.io/x/y\nfile.go:1:2: undefined: z\n\tmore\n"; got != want {
		t.Errorf("errors %q, want %q", got, want)
	}
}
