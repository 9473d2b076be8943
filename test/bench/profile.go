// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
)

// profileSeconds is the length of one CPU profile. A phase has several, which go tool pprof merges.
const profileSeconds = "2"

// profileCPU profiles the sidecars and the API server until stop is called. The last profile of each, which is
// incomplete, is dropped.
func (b *bench) profileCPU(ctx context.Context, phase string) (stop func()) {
	if b.o.profiles == "" {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	repeat := func(process string, profile func() ([]byte, error)) {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				data, err := profile()
				b.saveProfile(fmt.Sprintf("%s-%s-cpu-%d.pb.gz", phase, process, n), data, err)
			}
		})
	}
	for i, address := range b.profiled {
		repeat(fmt.Sprint("sidecar-", i), func() ([]byte, error) { return getProfile(ctx, address, "profile?seconds="+profileSeconds) })
	}
	repeat("apiserver", func() ([]byte, error) {
		return b.client.CoreV1().RESTClient().Get().AbsPath("/debug/pprof/profile").Param("seconds", profileSeconds).DoRaw(ctx)
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// profileMemory saves what the sidecars have allocated since their start, and what of it is in use.
func (b *bench) profileMemory(ctx context.Context, phase string) {
	if b.o.profiles == "" {
		return
	}
	for i, address := range b.profiled {
		data, err := getProfile(ctx, address, "heap")
		b.saveProfile(fmt.Sprintf("%s-sidecar-%d-heap.pb.gz", phase, i), data, err)
	}
}

func (b *bench) saveProfile(name string, data []byte, err error) {
	if err == nil {
		err = os.WriteFile(filepath.Join(b.o.profiles, name), data, 0o644)
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		say("profile %s: %v", name, err)
	}
}

// getProfile returns a profile that a process serves at address.
func getProfile(ctx context.Context, address, profile string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/debug/pprof/"+profile, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = errors.New(response.Status)
	}
	return data, err
}
