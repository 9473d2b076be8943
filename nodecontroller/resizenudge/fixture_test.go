// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizenudge

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/claimloop"
	"github.com/storage-controller/storage-controller/internal/claimtest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

type fixture struct {
	*claimtest.Fixture
	cfg Config
	c   *Controller // of the last start
}

func newFixture(t *testing.T, change func(f *fixture)) *fixture {
	t.Helper()
	f := &fixture{Fixture: claimtest.New(t)}
	f.cfg = Config{
		Enabled: true, Driver: f.Driver, Annotation: f.Driver + "/last-resizefs-requested-at",
		Settings: f.Settings(),
	}
	if change != nil {
		change(f)
	}
	f.start()
	return f
}

func (f *fixture) start() {
	f.Helper()
	retained := kube.RetainedFields{Nodes: true, Claims: true, PodAnnotations: []string{f.cfg.Annotation}}
	f.Fixture.Start(retained, func(p claimloop.Deps) claimtest.Controller {
		f.c = New(f.cfg, p)
		return f.c
	})
}

// settles waits until the controller has processed all earlier events.
func (f *fixture) settles() {
	f.Helper()
	f.Settle(func(name string) {
		f.Bound(name, f.Driver)
		f.Pod(name, name, "n", nil)
		f.Grow(name, time.Now())
		f.nudged(name, time.Time{})
	})
}

// nudged waits until the annotation of a pod is after since.
func (f *fixture) nudged(name string, since time.Time) (pod *corev1.Pod) {
	f.Helper()
	kubetest.Eventually(f.T, "pod "+name+" is annotated", func(context.Context) error {
		if pod = f.PodNow(name); pod == nil {
			return errors.New("it does not exist")
		}
		value := pod.Annotations[f.cfg.Annotation]
		if at, err := time.Parse(time.RFC3339Nano, value); err != nil || !at.After(since) || !strings.HasSuffix(value, "Z") {
			return fmt.Errorf("the annotation is %q, not after %v", value, since)
		}
		return nil
	})
	return pod
}
