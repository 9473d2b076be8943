// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// hangsFor returns a step that hangs for the requests for which concerns returns true.
func hangsFor(concerns func(request any) bool) csitest.Step {
	return func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		if concerns(request) {
			return csitest.Hang()(ctx, p, request, do)
		}
		return do()
	}
}

// A StorageClass whose calls hang leaves a worker to the claims, and to the deletions, of another class.
func TestClassThatHangs(t *testing.T) {
	const workers, limit, claims = 6, 4, 7
	f := newFixture(t, csitest.Config{}, func(c *Config) { c.WorkerThreads, c.Timeout = workers, time.Hour })
	class := map[string]string{}
	for _, name := range []string{"hangs", "busy", "answers"} {
		class[name] = f.Unique(name)
		f.makeClass(func(c *storagev1.StorageClass) { c.Name, c.Parameters = class[name], map[string]string{"which": name} })
	}
	f.Plugin.Always(create, hangsFor(func(request any) bool {
		r, ok := request.(*csi.CreateVolumeRequest)
		return ok && r.Parameters["which"] != "answers"
	}))
	f.start()
	claim := func(name, of string) *corev1.PersistentVolumeClaim {
		return f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name, c.Spec.StorageClassName = name, new(class[of]) })
	}
	hanging := []*corev1.PersistentVolumeClaim{claim("busy", "busy")} // without another class there is no limit
	f.Wait(create, 1)
	for i := range claims {
		hanging = append(hanging, claim(fmt.Sprint("hangs", i), "hangs"))
	}
	f.Wait(create, limit+1)
	answered := f.saved(claim("answers", "answers"))
	f.Calls(create, limit+2)

	f.Plugin.Always(create, nil)
	f.Plugin.Release()
	handles := map[string]bool{} // of the classes that hang
	var volumes []*corev1.PersistentVolume
	for _, c := range hanging {
		pv := f.saved(c)
		volumes, handles[pv.Spec.CSI.VolumeHandle] = append(volumes, pv), true
	}
	f.Calls(create, claims+2)
	f.Plugin.Always(remove, hangsFor(func(request any) bool {
		r, ok := request.(*csi.DeleteVolumeRequest)
		return ok && handles[r.VolumeId]
	}))
	for i, pv := range volumes {
		f.phase(pv, corev1.VolumeReleased)
		if i == 0 {
			f.Wait(remove, 1)
		}
	}
	f.Wait(remove, limit+1)
	f.phase(answered, corev1.VolumeReleased)
	f.gone(answered)
	f.Calls(remove, limit+2)
	f.Plugin.Always(remove, nil)
	f.Plugin.Release()
	for _, pv := range volumes {
		f.gone(pv)
	}
	f.Calls(remove, claims+2)
}

// The only class of a driver uses all workers.
func TestOnlyClassUsesAllWorkers(t *testing.T) {
	const workers = 5
	f := newFixture(t, csitest.Config{}, func(c *Config) { c.WorkerThreads, c.Timeout = workers, time.Hour })
	f.makeClass(nil)
	f.Plugin.Always(create, csitest.Hang())
	f.start()
	for i := range workers {
		f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = fmt.Sprint("data", i) })
	}
	f.Wait(create, workers)
}

// A claim that is deleted while its call waits for others of a limited method gets no volume.
func TestDeletedWhileWaiting(t *testing.T) {
	f := newFixture(t, csitest.Config{}, nil)
	f.FirstLimit = 1
	f.makeClass(nil)
	f.Plugin.Next(create, csitest.Hang())
	f.start()
	first := f.claim(nil)
	f.Wait(create, 1)
	second := f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = "second" })
	f.Waits("CreateVolume", 1)
	f.remove(second)
	kubetest.Eventually(f.T, "the deletion is cached", func(context.Context) error {
		cached, exists := f.c.claims.Get(keyOf(second).String())
		if exists && cached.DeletionTimestamp == nil {
			return errors.New("it is not")
		}
		return nil
	})
	f.Plugin.Release()
	f.saved(first)
	f.settles()
	f.Calls(create, 1)
}
