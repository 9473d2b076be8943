// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/intent"
)

// keySink is a [logr.LogSink] that writes nothing. It keeps the loop and the key that a worker adds to its logger.
type keySink struct {
	loop, key any
	bug       func(error) // is called for each panic, and each error that wraps [intent.ErrBug]
}

// keyOf returns the key that a worker processes with ctx, "" outside of a loop. Workers that process different keys can send
// equal requests.
func keyOf(ctx context.Context) string {
	if s, ok := klog.FromContext(ctx).GetSink().(keySink); ok && s.loop != nil {
		return fmt.Sprintf("%s %#v", s.loop, s.key)
	}
	return ""
}

func (keySink) Init(logr.RuntimeInfo)    {}
func (keySink) Enabled(int) bool         { return false }
func (keySink) Info(int, string, ...any) {}
func (s keySink) Error(err error, _ string, _ ...any) {
	if errors.Is(err, intent.ErrBug) || err != nil && strings.HasPrefix(err.Error(), "panic: ") {
		s.bug(err)
	}
}
func (s keySink) WithName(string) logr.LogSink { return s }
func (s keySink) WithValues(kv ...any) logr.LogSink {
	for i := 0; i+1 < len(kv); i += 2 {
		switch kv[i] {
		case "loop":
			s.loop = kv[i+1]
		case "key":
			s.key = kv[i+1]
		}
	}
	return s
}
