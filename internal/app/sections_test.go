// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/settings"
)

// readLine reads the settings of a command line for "all".
func readLine(args ...string) (Config, error) {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	All.Register(fs)
	if err := fs.Parse(WithSections(fs, args)); err != nil {
		return Config{}, err
	}
	c, err := All.Read(fs, "test")
	return c.Enabled(), err
}

// TestSections checks what a command line with sections means, as a configuration without sections, or its error.
func TestSections(t *testing.T) {
	for line, want := range map[string]string{
		"-- csi-attacher":      "controllers=attacher nodecontroller.resize-nudge=true",
		"-- csi-attacher -v=2": "controllers=attacher v=2",
		"-- csi-provisioner -- csi-attacher --worker-threads 3 -- csi-resizer --worker-threads=4": "" +
			"controllers=provisioner,attacher,resizer " +
			"provisioner.worker-threads=100 attacher.worker-threads=3 resizer.workers=4 capacity.enable-capacity=false",
		"-- csi-provisioner --enable-capacity --timeout=3s": "controllers=provisioner,capacity provisioner.timeout=3s capacity.timeout=3s",
		"-- capacity --capacity-threads=3":                  "controllers=capacity capacity.capacity-threads=3",
		"-- csi-provisioner -- capacity":                    "error: sections csi-provisioner and capacity: both set the role capacity",
		"-- nodecontroller --driver-name=a.b": "controllers=nodecontroller nodecontroller.leader-election=true " +
			"nodecontroller.leader-election-retry-period=2s",
		"--timeout=9s --attacher-resync=1h -- csi-attacher --max-entries=2 -- csi-resizer --timeout=2s": "attacher.timeout=9s " +
			"resizer.timeout=2s attacher.resync=1h0m0s attacher.max-entries=2",
		"-- csi-attacher -csi-address=/x.sock -v=2 -- csi-resizer --csi-address unix:///x.sock --v=5": "v=5 csi-address=/x.sock",
		"--csi-address=/x.sock -- csi-attacher --csi-address=/x.sock -- csi-resizer":                  "csi-address=/x.sock",
		"-- csi-attacher --vmodule=a=1 --log-flush-frequency=9s -- csi-resizer --vmodule=b=2 --log-flush-frequency=3s": "vmodule=a=1,b=2 " +
			"log-flush-frequency=3s",
		"-- csi-attacher --max-grpc-log-length=-1 -- csi-resizer --max-grpc-log-length=9": "max-grpc-log-length=9",
		"-- csi-resizer --csiTimeout=3s --enable-leader-election -- csi-attacher --connection-timeout 5s": "resizer.timeout=3s " +
			"resizer.leader-election=true attacher.leader-election=false",
		"-- csi-snapshotter --enable-volume-group-snapshots=false --snapshotter=x word": "" +
			"snapshotter.feature-gates=CSIVolumeGroupSnapshot=false",
		"-- csi-attacher --http_endpoint=:1 -- livenessprobe --health-port=9900 --v=4": "attacher.http-endpoint=:1 " +
			"livenessprobe.health-port=9900 v=4 livenessprobe.csi-address=/run/csi/socket csi-address=/run/csi/socket",
		"-- csi-attacher --csi-address=/a -- livenessprobe --csi-address=/b": "csi-address=/a livenessprobe.csi-address=/b",

		"--":                                                 "error: the name of a section must follow --",
		"-- csi-attachr":                                     `error: unknown section "csi-attachr": must be one of capacity, csi-attacher`,
		"-- topolvm-controller":                              "error: run the command topolvm",
		"-- csi-attacher -- csi-attacher":                    "error: section csi-attacher: set twice",
		"-- csi-attacher --foo":                              `error: section csi-attacher: unknown flag: --foo; see "csi-attacher --help"`,
		"-- csi-attacher --timeout=x":                        "error: section csi-attacher: invalid argument",
		"-- csi-attacher --timeout=-1s":                      "error: attacher: --timeout: must be positive",
		"-- csi-attacher --worker-threads=1e9":               "error: section csi-attacher: invalid argument",
		"-- csi-attacher --config=x":                         "error: section csi-attacher: --config: set it before the first section",
		"--attacher-timeout=1s -- csi-attacher --timeout=1s": "error: --attacher-timeout and --timeout in section csi-attacher: only one",
		"--controllers=attacher -- csi-attacher":             "error: --controllers: cannot be set with sections",
		"-- csi-attacher --csi-address=/a -- csi-resizer":    `error: section csi-attacher has "/a", section csi-resizer has "/run/csi/socket"`,
		"-- csi-attacher --kubeconfig=/a -- csi-resizer":     "error: --kubeconfig",
		"--log-text-split-stream -- csi-attacher --log-text-split-stream=false": "error: --log-text-split-stream",
		"-- livenessprobe":                                 "error: section livenessprobe: requires a section with a role",
		"-- csi-attacher -- livenessprobe --x":             "error: section livenessprobe: unknown flag: --x",
		"-- csi-attacher -- livenessprobe --health-port=x": "error: livenessprobe: --health-port: must be a port",
		"-- csi-attacher --http-endpoint=:9808 -- livenessprobe": "error: livenessprobe: --http-endpoint and --health-port: :9808 is the " +
			"address of attacher",
	} {
		c, err := readLine(strings.Fields(line)...)
		if err == nil {
			err = c.Validate()
		}
		if message, isError := strings.CutPrefix(want, "error: "); isError {
			if err == nil || !strings.Contains(err.Error(), message) || strings.Contains(err.Error(), "\n") {
				t.Errorf("all %s: got the error %v, want %q", line, err, message)
			}
			continue
		}
		if err != nil {
			t.Errorf("all %s: %v", line, err)
			continue
		}
		have := map[string]string{}
		for _, g := range c.Groups {
			g.Flags.VisitAll(func(f *pflag.Flag) { have[strings.TrimPrefix(g.Name+"."+f.Name, ".")] = f.Value.String() })
		}
		for _, pair := range strings.Fields(want) {
			option, value, _ := strings.Cut(pair, "=")
			if have[option] != value {
				t.Errorf("all %s: %s is %q, want %q", line, option, have[option], value)
			}
		}
		samePrinted(t, line, c)
	}
}

// samePrinted checks that the file that "config print" prints means the same.
func samePrinted(t *testing.T, line string, c Config) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	printed, err := c.File()
	if err == nil {
		err = os.WriteFile(file, printed, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	again, err := readLine("--config=" + file)
	if err == nil {
		err = again.Validate()
	}
	if err != nil {
		t.Errorf("all %s: the printed file: %v", line, err)
		return
	}
	reprinted, err := again.File()
	if err != nil || string(reprinted) != string(printed) || !slices.Equal(names(again.roles), names(c.roles)) {
		t.Errorf("all %s: %v; printed:\n%s\nits meaning:\n%s", line, err, printed, reprinted)
	}
}

// TestSectionMeansWhatItsImageMeans compares each option of a role in a section with that in the image.
func TestSectionMeansWhatItsImageMeans(t *testing.T) {
	t.Setenv("STORAGE_CONTROLLER_TIMEOUT", "41s")
	t.Setenv("STORAGE_CONTROLLER_RESIZER_WORKERS", "8")
	for name, roles := range sectionRoles {
		some := []string{"--leader-election", "-v=3", "--kube-api-qps=5", "--feature-gates=Topology=false", "--http-endpoint=:1"}
		for _, args := range [][]string{nil, some} {
			if name == livenessprobeName {
				continue
			}
			image := configOf(t, roles, settings.LongFlags(imageFlags(roles), args)...)
			section, err := readLine(slices.Concat([]string{"--", name}, args)...)
			if err != nil {
				t.Fatal(err)
			}
			for i, g := range image.Groups {
				if g.Unused {
					continue
				}
				g.Flags.VisitAll(func(f *pflag.Flag) {
					other := section.Groups[i].Flags.Lookup(f.Name)
					if i < 2 && other == nil { // options of the process that are options of a command
						return
					}
					key := g.Name + "." + f.Name
					if other == nil || other.Value.String() != f.Value.String() || image.Origin(key) != section.Origin(key) {
						t.Errorf("%s %q: --%s of %s: the image has %s, the section has %+v", name, args, f.Name, g.Name, f.Value, other)
					}
				})
			}
		}
	}
}

func imageFlags(roles Selection) *pflag.FlagSet {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	roles.Register(fs)
	return fs
}

// TestSectionLivenessprobe: the process serves the health of the driver as livenessprobe does, and at no address anything twice.
func TestSectionLivenessprobe(t *testing.T) {
	plugin := csitest.Run(t, csitest.Config{})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	cp := kubetest.Get(t)
	c, err := readLine("--kubeconfig="+cp.Kubeconfig(), "--csi-address="+plugin.Address(), "--", "csi-attacher", "--", "livenessprobe",
		"--csi-address="+plugin.Address(), "--http-endpoint="+address)
	if err == nil {
		err = c.Validate()
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Run(t.Context()); err == nil || !strings.Contains(err.Error(), address) {
		t.Errorf("the address is in use: %v", err)
	}
	listener.Close()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	defer func() {
		stop()
		<-ended
	}()
	client := http.Client{Timeout: 10 * time.Second}
	for _, want := range []int{http.StatusOK, http.StatusInternalServerError} {
		kubetest.Eventually(t, fmt.Sprintf("/healthz answers %d", want), func(context.Context) error {
			response, err := client.Get("http://" + address + "/healthz")
			if err != nil {
				return err
			}
			response.Body.Close()
			if response.StatusCode != want {
				return fmt.Errorf("status %d", response.StatusCode)
			}
			return nil
		})
		plugin.Stop()
	}
}

// TestRetiredFlagsOfImages: the log says what became of the flags of older releases.
func TestRetiredFlagsOfImages(t *testing.T) {
	got := configOf(t, Resize, "--csiTimeout=3s", "--connection-timeout=5s", "--workers=3").Notes
	if want := []string{"--csiTimeout is now --timeout", "--connection-timeout has no effect any more"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
