// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"testing"

	"github.com/spf13/pflag"
)

// TestHealthPort: like livenessprobe, the subcommand refuses only another port than the default beside --http-endpoint.
func TestHealthPort(t *testing.T) {
	for port, refused := range map[string]bool{"9808": false, "9809": true} {
		var l Livenessprobe
		fs := pflag.NewFlagSet("livenessprobe", pflag.ContinueOnError)
		l.Register(fs)
		if err := fs.Parse([]string{"--health-port=" + port, "--http-endpoint=:9810"}); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Read(fs); (err != nil) != refused {
			t.Errorf("port %s: %v", port, err)
		}
	}
}
