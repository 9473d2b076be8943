// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

func TestMain(m *testing.M) {
	if root := os.Getenv("HOSTDRIVER_ROOT"); root != "" { // the driver as a process of its own, to be killed
		if err := run(config{root: root, name: "d", node: "n1",
			nodes: map[string]map[string]string{"n1": {"zone": "a"}, "n2": {"zone": "b"}}}, os.Getenv("HOSTDRIVER_SOCKET"),
			"1Gi"); err != nil {
			panic(err)
		}
		return
	}
	os.Exit(m.Run())
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "hd") // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestSanity(t *testing.T) {
	dir := shortDir(t)
	d, err := newDriver(config{root: filepath.Join(dir, "v"), name: "host.example.com", node: "n1",
		nodes: map[string]map[string]string{"n1": {"zone": "a"}}, capacity: 1 << 40})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	server := d.server()
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	cfg := sanity.NewTestConfig()
	cfg.Address = csitest.SanityAddress
	cfg.DialOptions = append(cfg.DialOptions, csitest.SanityDialer(filepath.Join(dir, "s")))
	cfg.TargetPath, cfg.StagingPath = filepath.Join(dir, "target"), filepath.Join(dir, "staging")
	sanity.Test(t, cfg)
}

func client(t *testing.T, cfg config) (*driver, config) {
	t.Helper()
	if cfg.root == "" {
		cfg.root = t.TempDir()
	}
	if cfg.capacity == 0 {
		cfg.capacity = 1 << 30
	}
	d, err := newDriver(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return d, cfg
}

func request(name string, size int64) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}}}
}

func mustCreate(t *testing.T, d *driver, r *csi.CreateVolumeRequest) string {
	t.Helper()
	response, err := d.CreateVolume(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return response.GetVolume().GetVolumeId()
}

func TestOddNamesStayInTheRoot(t *testing.T) {
	d, cfg := client(t, config{})
	for _, name := range []string{"../../etc/passwd", "/", ".", "a/b", "a\x00b", strings.Repeat("x", 10000), "vol.json"} {
		id := mustCreate(t, d, request(name, 1))
		if !validID.MatchString(id) {
			t.Errorf("%q has ID %q", name, id)
		}
	}
	if files, err := os.ReadDir(filepath.Dir(cfg.root)); err != nil || len(files) != 1 {
		t.Errorf("%v, %v beside the root", files, err)
	}
	for _, id := range []string{"../x", "vol-../../../../x", ""} {
		_, _ = d.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	}
	if n := len(d.entries); n != 7 {
		t.Errorf("%d volumes are left", n)
	}
}

func TestCapacityIsShared(t *testing.T) {
	d, _ := client(t, config{capacity: 100 << 20, nodes: map[string]map[string]string{"n1": {"zone": "a"}, "n2": {"zone": "b"}}})
	free := func(zone string) int64 {
		r,
			err := d.GetCapacity(t.Context(),
			&csi.GetCapacityRequest{AccessibleTopology: &csi.Topology{Segments: map[string]string{"zone": zone}}})
		if err != nil {
			t.Fatal(err)
		}
		return r.GetAvailableCapacity()
	}
	first := mustCreate(t, d, request("1", 60<<20))
	if a, b := free("a"), free("b"); a != 40<<20 || b != 100<<20 {
		t.Errorf("free: %d and %d", a, b)
	}
	mustCreate(t, d, request("2", 60<<20)) // in the other zone
	if _, err := d.CreateVolume(t.Context(), request("3", 60<<20)); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("third: %v", err)
	}
	if _, err := d.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: first}); err != nil {
		t.Fatal(err)
	}
	mustCreate(t, d, request("3", 60<<20))
}

func TestCopiesHaveTheContent(t *testing.T) {
	d, cfg := client(t, config{})
	id := mustCreate(t, d, request("source", 1<<20))
	if err := os.WriteFile(filepath.Join(dataPath(cfg.root, id), "file"), []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	snapshot, err := d.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
	if err != nil {
		t.Fatal(err)
	}
	clone := request("clone", 1<<20)
	clone.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id},
	}}
	restore := request("restore", 2<<20)
	restore.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot.GetSnapshot().GetSnapshotId()},
	}}
	for _, r := range []*csi.CreateVolumeRequest{clone, restore} {
		copied := mustCreate(t, d, r)
		if data, err := os.ReadFile(filepath.Join(dataPath(cfg.root, copied), "file")); err != nil || string(data) != "hello" {
			t.Errorf("%s has %q, %v", r.GetName(), data, err)
		}
	}
}

func TestUnfinishedVolumesAreRemovedAtStart(t *testing.T) {
	d, cfg := client(t, config{})
	id := mustCreate(t, d, request("whole", 1))
	half := filepath.Join(cfg.root, idOf("vol", "half"))
	if err := os.Mkdir(half, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(infoPath(cfg.root, idOf("vol", "half"))+".tmp", []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	d, _ = client(t, cfg)
	if d.entries[id] == nil || len(d.entries) != 1 {
		t.Errorf("there are %v", d.entries)
	}
	if files, err := os.ReadDir(cfg.root); err != nil || len(files) != 2 {
		t.Errorf("%v, %v", files, err)
	}
}

// TestStateSurvivesBeingKilled kills the driver as a process while volumes are made.
func TestStateSurvivesBeingKilled(t *testing.T) {
	dir := shortDir(t)
	root, socket := filepath.Join(dir, "v"), filepath.Join(dir, "s")
	quick := backoff.Config{BaseDelay: 10 * time.Millisecond, MaxDelay: 100 * time.Millisecond}
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: quick, MinConnectTimeout: 20 * time.Second}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	controller := csi.NewControllerClient(conn)
	start := func() *exec.Cmd {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "HOSTDRIVER_ROOT="+root, "HOSTDRIVER_SOCKET="+socket)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var published string
	for round := range 5 {
		cmd := start()
		for i := range 20 {
			// Only the first call waits for the driver: a later one would wait for a driver that was killed.
			response, err := controller.CreateVolume(ctx, request(string(rune('a'+i)), 1), grpc.WaitForReady(i == 0))
			if err != nil {
				break // killed meanwhile
			}
			if i == 0 {
				published = response.GetVolume().GetVolumeId()
				if _, err := controller.ControllerPublishVolume(ctx,
					&csi.ControllerPublishVolumeRequest{VolumeId: published, NodeId: "n1",
						VolumeCapability: request("", 0).GetVolumeCapabilities()[0]}); err != nil {
					t.Fatal(err)
				}
			}
			if i == round*4 {
				go func() { _ = cmd.Process.Kill() }()
			}
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	cmd := start()
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for i := range 20 {
		if _, err := controller.CreateVolume(ctx, request(string(rune('a'+i)), 1), grpc.WaitForReady(true)); err != nil {
			t.Fatal(err)
		}
	}
	var volumes []*csi.ListVolumesResponse_Entry
	for token := ""; ; {
		page, err := controller.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 7, StartingToken: token})
		if err != nil {
			t.Fatal(err)
		}
		volumes = append(volumes, page.GetEntries()...)
		if token = page.GetNextToken(); token == "" {
			break
		}
	}
	if len(volumes) != 20 {
		t.Errorf("%d volumes, want 20", len(volumes))
	}
	for _, v := range volumes {
		want := 0
		if v.GetVolume().GetVolumeId() == published {
			want = 1
		}
		if got := len(v.GetStatus().GetPublishedNodeIds()); got != want {
			t.Errorf("volume %s is published to %d nodes, want %d", v.GetVolume().GetVolumeId(), got, want)
		}
	}
}

func TestExpansionExtendsTheDevice(t *testing.T) {
	d, cfg := client(t, config{})
	r := request("block", 1<<20)
	r.VolumeCapabilities[0].AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	id := mustCreate(t, d, r)
	if _, err := d.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: id,
		CapacityRange: &csi.CapacityRange{RequiredBytes: 3 << 20}}); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(d.entries[id].blockPath(cfg.root)); err != nil || info.Size() != 3<<20 {
		t.Errorf("the device has %v, %v", info, err)
	}
}

func TestGroupSnapshotsAreCreatedWholeOrNotAtAll(t *testing.T) {
	d, cfg := client(t, config{})
	a, b := mustCreate(t, d, request("a", 1<<20)), mustCreate(t, d, request("b", 1<<20))
	create := func(sources ...string) (*csi.CreateVolumeGroupSnapshotResponse, error) {
		return d.CreateVolumeGroupSnapshot(t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: sources})
	}
	if _, err := create(a, "vol-00000000000000000000"); status.Code(err) != codes.NotFound {
		t.Errorf("a source that does not exist: %v", err)
	}
	d, _ = client(t, cfg)
	if len(d.entries) != 2 {
		t.Errorf("%d entries after a failed call, want 2", len(d.entries))
	}
	first, err := create(a, b)
	if err != nil {
		t.Fatal(err)
	}
	again, err := create(b, a)
	if err != nil || again.GetGroupSnapshot().GetGroupSnapshotId() != first.GetGroupSnapshot().GetGroupSnapshotId() {
		t.Errorf("the same call again: %v, %v", again, err)
	}
	if _, err := create(a); status.Code(err) != codes.AlreadyExists {
		t.Errorf("other sources: %v", err)
	}
	if _, err := d.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{
		GroupSnapshotId: first.GetGroupSnapshot().GetGroupSnapshotId()}); err != nil || len(d.entries) != 2 {
		t.Errorf("%d entries after the deletion, %v", len(d.entries), err)
	}
}
