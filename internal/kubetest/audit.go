// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// AuditEvent is one line of the audit log: a completed request, or a watch that was started.
type AuditEvent struct {
	Stage      string `json:"stage"` // ResponseStarted (watches) or ResponseComplete
	Verb       string `json:"verb"`
	UserAgent  string `json:"userAgent"`
	RequestURI string `json:"requestURI"`
	As         struct {
		Username string `json:"username"`
	} `json:"impersonatedUser"` // none if the request impersonates no user
	Object struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	Status struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	Received time.Time `json:"requestReceivedTimestamp"`
	Answered time.Time `json:"stageTimestamp"`
}

// Resource returns the resource, followed by a slash and the subresource if there is one.
func (r AuditEvent) Resource() string {
	if r.Object.Subresource != "" {
		return r.Object.Resource + "/" + r.Object.Subresource
	}
	return r.Object.Resource
}

// IsWrite reports whether the request modifies objects.
func (r AuditEvent) IsWrite() bool {
	switch r.Verb {
	case "create", "update", "patch", "delete", "deletecollection":
		return true
	}
	return false
}

// AuditOffset returns the current end of the audit log, for [ControlPlane.AuditSince]. All requests that
// were answered before are in front of it.
func (c *ControlPlane) AuditOffset() (int64, error) {
	f, err := os.Open(c.auditLog())
	if os.IsNotExist(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, err
	}
	return lastLineEnd(f, end)
}

// lastLineEnd returns the position behind the last complete line of the first end bytes: the file system shows
// a line in pieces while the API server writes it.
func lastLineEnd(f io.ReaderAt, end int64) (int64, error) {
	chunk := make([]byte, 64<<10)
	for end > 0 {
		begin := max(0, end-int64(len(chunk)))
		part := chunk[:end-begin]
		if _, err := f.ReadAt(part, begin); err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(part, '\n'); i >= 0 {
			return begin + int64(i) + 1, nil
		}
		end = begin
	}
	return 0, nil
}

func (c *ControlPlane) auditLog() string { return filepath.Join(c.cfg.Dir, "audit.log") }

// AuditSince returns the events after mark whose user agent begins with agent, in the order of the
// responses. A request is logged before its response is sent.
func (c *ControlPlane) AuditSince(mark int64, agent string) ([]AuditEvent, error) {
	if !c.cfg.Audit {
		return nil, fmt.Errorf("this control plane was started without an audit log")
	}
	f, err := os.Open(c.auditLog())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := f.Seek(mark, io.SeekStart); err != nil {
		return nil, err
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	var records []AuditEvent
	for line := range bytes.Lines(data) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // an incomplete line
		}
		if i := bytes.LastIndex(line, eventBegin); i > 0 { // an API server was killed while it wrote the first part
			line = line[i:]
		}
		var r AuditEvent
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("reading the audit log: %w in line %q", err, line)
		}
		if strings.HasPrefix(r.UserAgent, agent) {
			records = append(records, r)
		}
	}
	return records, nil
}

// eventBegin is how every line of the audit log begins. Inside of an event its quotes would be escaped.
var eventBegin = []byte(`{"kind":"Event","apiVersion":"audit.k8s.io/`)
